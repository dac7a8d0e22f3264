"""Several machines on this one: each a set of Linux namespaces, together in a rack with a switch.

A machine has its own hostname, address, /tmp, /dev/shm, /run and process table. The rest of the
file system is shared. The rack is a pid and a network namespace around all of them: the host sees no
new interface, two racks do not see each other, and nothing outlives its rack.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

import forge

from .inside import Inside, login_environment
from .settings import CONTROLLER, Settings

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
RACK = "rack"
# Each machine has these for itself; node_init.sh puts the shared paths below them back.
PRIVATE = ("/tmp", "/dev/shm", "/run", "/var/spool")
READY_SEC = 60


class ClusterError(Exception):
    """The cluster did not do what was asked; the message holds what it said."""


def wait_until(
    done: Callable[[], object],
    timeout: float,
    what: str,
    seen: Callable[[], str] = str,
    every: float = 0.02,
) -> None:
    """Ask `done` until it says yes. ClusterError after `timeout` seconds: not `what`, but `seen`."""
    end = time.monotonic() + timeout
    while not done():
        if time.monotonic() > end:
            raise ClusterError(f"not {what} within {timeout:g} s. {seen()}".rstrip())
        time.sleep(every)


def own_folder(folder: Path) -> Path:
    """The directory, into which nobody but this user (root) can write; made where it is missing.

    ClusterError for anything else of that name: root removes what is below it, and kills the processes
    whose pids are there.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()  # not stat, which would follow a planted link
    if not stat.S_ISDIR(found.st_mode):
        wrong = "is not a directory, or a link to one"
    elif found.st_uid != os.geteuid():
        wrong = f"belongs to user {found.st_uid}"
    elif found.st_mode & 0o022:
        wrong = f"has mode {stat.S_IMODE(found.st_mode):o}: others may write there"
    else:
        return folder
    raise ClusterError(f"{folder} {wrong}: remove it, or set FORGE_SLURM_DIR to another directory")


class Machines:
    """The machines whose state is in `folder`. Several processes may have an object for it."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder = own_folder(folder.parent.resolve() / folder.name)
        self.settings = settings
        self._started: list[Inside] = []

    # ------------------------------------------------------------------ power

    def is_up(self) -> bool:
        """Return whether the rack runs; single machines may have no power."""
        return self._pid(RACK) is not None

    def start_rack(self) -> None:
        if not self.is_up():
            self._start(RACK, ["--net", "--pid"], ["rack_init.sh", str(self.folder)])

    def start(self, name: str, interface: str | None = None) -> None:
        """Give a machine power and plug it in; it boots until wait_ready() returns."""
        if self._pid(name):
            return
        interface = interface or self.settings.interfaces.get(name, "eth0")
        own = self.settings
        script = ["node_init.sh", str(self.folder), name, own.address(name), interface]
        decoy = (own.decoy, own.decoy_address(name))
        words = [*script, *decoy, str(own.tmp_mib), *self._shared_paths()]
        rack = ["nsenter", "--net", "--pid", "--target", str(self._running(RACK))]
        self._start(name, ["--net", "--pid", "--mount", "--uts", "--ipc"], words, inside=rack)
        if own.decoy_address(name):  # first, so that the kernel lists it first
            self._new_cable(name, f"{name}-decoy", own.decoy)
        self._new_cable(name, name, interface)
        self._in_rack("ip", "link", "set", name, "master", "switch")

    def wait_ready(self, name: str) -> None:
        """Wait until the machine has booted. ClusterError with its messages when it does not."""
        own = self._own(name)

        def booted() -> bool:
            self._running(name)
            return (own / "ready").exists()

        try:
            wait_until(booted, READY_SEC, "booted")
        except ClusterError as error:
            raise ClusterError(f"{name}: {error}\n{(own / 'init.log').read_text()}") from None

    def boot(self, name: str, interface: str | None = None) -> None:
        """Start a machine; `interface` gives its network link another name than usual. A node that
        is back before Slurm missed it keeps its jobs in state RUNNING, for ever, without a process.
        """
        self.start(name, interface)
        self.wait_ready(name)

    def power_cut(self, name: str) -> None:
        """A machine loses its power: all its processes end at once, its /tmp is lost."""
        # The cable first: a machine without power sends no word of how its tasks ended.
        self._in_rack("ip", "link", "delete", name, check=False)
        self._kill(name)

    def cut_all(self) -> None:
        """All machines lose their power, the rack too."""
        self._kill(RACK)

    def _start(
        self, name: str, kinds: list[str], script: list[str], inside: Sequence[str] = ()
    ) -> None:
        """Start the script as pid 1 of new namespaces; return when it has said its pid."""
        own = self._own(name)
        for mark in ("pid", "ready"):
            (own / mark).unlink(missing_ok=True)
        new = ["setsid", "--fork", *inside, "unshare", "--fork", "--kill-child", *kinds]
        with open(own / "init.log", "w") as log:
            subprocess.run(
                [*new, "bash", str(HERE / script[0]), *script[1:]],
                cwd="/",
                env=login_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                check=True,
            )
        wait_until(lambda: self._pid(name), 10, f"started: {name}", (own / "init.log").read_text)

    def _new_cable(self, name: str, port: str, interface: str) -> None:
        """A cable from the machine's interface to a port in the rack, not connected to the switch."""
        end = ["peer", "name", interface, "netns", str(self._running(name))]
        self._in_rack("ip", "link", "delete", port, check=False)
        self._in_rack("ip", "link", "add", port, "type", "veth", *end)
        self._in_rack("ip", "link", "set", port, "up")

    def _shared_paths(self) -> list[str]:
        """Paths that stay visible although they lie below a folder that each machine has for itself: this
        cluster, the project, Forge, and its Python, whose environment may consist of links."""
        of_python = (sys.prefix, sys.base_prefix, Path(sys.prefix, "bin").resolve().parent)
        wanted = {
            self.folder,
            REPOSITORY,
            Path(forge.__file__).resolve().parents[1],
            *(Path(path).resolve() for path in of_python),
        }
        below = {path for path in wanted for top in PRIVATE if path.is_relative_to(top)}
        outermost = (p for p in below if not below & set(p.parents))
        return sorted(str(path) for path in outermost)

    def _own(self, name: str) -> Path:
        """The folder with the pid and the logs of a machine."""
        names = [RACK, *self.settings.machine_names]
        if name not in names:
            raise ClusterError(f"no machine {name!r}; there are {', '.join(names)}")
        return self.folder / "machines" / name

    def _pid(self, name: str) -> int | None:
        """The host's pid of a machine's pid 1; None when it has no power."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, ValueError):
            pid = int((self._own(name) / "pid").read_text())
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            # The pid may belong to somebody else by now.
            if str(self.folder) in command and (name == RACK or name in command):
                return pid
        return None

    def _running(self, name: str) -> int:
        if pid := self._pid(name):
            return pid
        raise ClusterError(f"{name} has no power (cluster in {self.folder})")

    def _kill(self, name: str) -> None:
        """SIGKILL to pid 1: the kernel kills all that is in its pid namespace with it."""
        if pid := self._pid(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            wait_until(lambda: not psutil.pid_exists(pid), 20, f"dead: {name}")

    # ------------------------------------------------------------------ commands

    def popen(
        self,
        *command: str | Path,
        machine: str = CONTROLLER,
        cwd: Path = REPOSITORY,
        env: dict[str, str] | None = None,
        stdout: int | None = subprocess.PIPE,
        stderr: int | None = subprocess.STDOUT,
    ) -> Inside:
        """Start a command in a machine, as from a login shell plus `env`, in its own session."""
        process = Inside(
            [*self._enter(machine, cwd), *(str(word) for word in command)],
            env={**login_environment(), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def run(
        self,
        *command: str | Path,
        machine: str = CONTROLLER,
        cwd: Path = REPOSITORY,
        env: dict[str, str] | None = None,
        timeout: float = 60,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a machine to its end. subprocess.TimeoutExpired, and it is killed, when
        it takes longer than `timeout` seconds; with check, ClusterError when it fails."""
        process = self.popen(*command, machine=machine, cwd=cwd, env=env, stderr=subprocess.PIPE)
        words = [str(word) for word in command]
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as late:
            process.kill_group()
            raise subprocess.TimeoutExpired(words, timeout, late.stdout, late.stderr) from None
        except BaseException:
            process.kill_group()
            raise
        if check and process.returncode:
            said = f"{out}{err}".strip()
            raise ClusterError(f"{' '.join(words)} on {machine}: rc {process.returncode}: {said}")
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def kill_started(self) -> None:
        """Kill what this object's popen() and run() started and what still runs."""
        for process in self._started:
            process.kill_group()
            if process.stdout:
                process.stdout.close()
        self._started.clear()

    def become(self, *command: str, machine: str, cwd: Path) -> None:
        """Replace this process by a command in a machine, on the same terminal."""
        words = [*self._enter(machine, cwd), *command]
        os.execvpe(words[0], words, login_environment())

    def _enter(self, machine: str, cwd: Path) -> list[str]:
        namespaces = ["--mount", "--uts", "--ipc", "--net", "--pid"]
        target = ["--target", str(self._running(machine))]
        # env changes the folder after entering: the machine has a /tmp of its own.
        return ["nsenter", *namespaces, *target, "--", "env", f"--chdir={cwd}"]

    def _in_rack(self, *command: str, check: bool = True) -> None:
        """Run a command of the host in the network of the switch."""
        rack = ["nsenter", "--net", "--target", str(self._running(RACK)), "--"]
        done = subprocess.run([*rack, *command], capture_output=True, text=True, check=False)
        if check and done.returncode:
            raise ClusterError(f"{' '.join(command)}: {done.stderr.strip()}")
