"""This host and its processes: host name, identity of a process, termination with its parent."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import pwd
import re
import resource
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any, Literal

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
MAX_OPEN_FILES = 65_536  # some programs close all that they may have open, one by one
INITIAL_NAMESPACE = 0xEFFFFFFC  # of pids, which contains all others: PROC_PID_INIT_INO of Linux

# JOB:RESTART of the Slurm job that a Snakemake runs in, for all that it starts. The executor takes away
# Slurm's own variables, and in rules the number of restarts is missing, which Slurm knows of the last
# start alone.
SLURM_START = "FORGE_SLURM_START"

Life = Literal["alive", "gone", "unknown"]


def hostname() -> str:
    return socket.gethostname().split(".")[0]


def user_name(uid: int) -> str:
    """Name of a user; the number where this host has no name for it."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def free_port() -> int:
    """A TCP port that is free on this host now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def slurm_start() -> tuple[str, int | None]:
    """The Slurm job that this process belongs to, "" outside of one, and which start of that job: 0 for
    the first one, None where only Slurm could tell."""
    start = os.environ.get(SLURM_START, "")
    kept, _, restart = start.partition(":")
    job = os.environ.get("SLURM_JOB_ID") or kept
    if job == kept:
        return job, int(restart) if restart else None
    # Slurm gives the number to the batch script of a restart, and not to its steps.
    number = os.environ.get("SLURM_RESTART_COUNT", "" if "SLURM_STEP_ID" in os.environ else "0")
    return job, int(number) if number else None


def slurm_start_variable() -> dict[str, str]:
    """The variable with which processes know `slurm_start` of this one; {} outside of Slurm."""
    job, restart = slurm_start()
    return {SLURM_START: f"{job}:{'' if restart is None else restart}"} if job else {}


def node_local_folder() -> Path:
    """The directory for node-local data: the job's, else the user's, else /tmp."""
    return Path(os.environ.get("SLURM_TMPDIR") or os.environ.get("TMPDIR") or "/tmp")


@dataclass(frozen=True)
class Process:
    """The identity of a process, which differs from that of any other process with the same pid.

    Made of the kernel's boot id and ticks: the wall clock may jump, and with it the boot time in
    /proc/stat. Containers of one host, and hosts of two clusters, may have the same name.
    """

    host: str
    pid: int  # in its pid namespace
    pid_namespace: int  # inode of /proc/PID/ns/pid; two of one boot that exist at a time differ
    boot_id: str  # random, new at each boot
    machine_id: str  # of the installation, also after a reboot; "" where it has none
    start_ticks: int  # from boot to its start, in clock ticks
    slurm_job: str | None = None

    @classmethod
    def current(cls) -> Process:
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> Process:
        """The process with this pid on this host. Raises ProcessLookupError without one."""
        state = _state_and_start(pid)
        if state is None:
            raise ProcessLookupError(f"no process {pid} on {hostname()}")
        return cls(
            host=hostname(),
            pid=pid,
            pid_namespace=_pid_namespace("self"),
            boot_id=boot_id(),
            machine_id=_machine_id(),
            start_ticks=state[1],
            slurm_job=slurm_start()[0] or None,
        )

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Process:
        """Raises KeyError when a field is missing; other keys are ignored."""
        return cls(**{field.name: value[field.name] for field in fields(cls)})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def is_here(self) -> bool:
        """Return whether the process belongs to this host, boot and pid namespace, where its pid
        identifies it."""
        here = (hostname(), boot_id(), _pid_namespace("self"))
        return (self.host, self.boot_id, self.pid_namespace) == here

    def life(self) -> Life:
        """State of the process: `gone` for a zombie, too, and where another process has its pid.

        `unknown` where this process cannot tell: the other is of another host, or in a pid namespace (a
        container) that is not part of this one. Seen from outside of its pid namespace, any process there
        that has its pid counts as alive.
        """
        if self.host != hostname():
            return "unknown"
        if self.boot_id != boot_id():
            return "gone" if self._ended_with_its_boot() else "unknown"
        if self.is_here:
            return "alive" if self._runs_here() else "gone"
        if _pid_namespace("self") == INITIAL_NAMESPACE and _sees_all():
            return "alive" if any(map(self._may_be, Path("/proc").glob("[0-9]*"))) else "gone"
        return "unknown"

    def is_stopped(self, stats: str) -> bool:
        """Return whether one of these lines of /proc/PID/stat, read on its host, shows the process as
        stopped: by SIGSTOP, or by a debugger."""
        lines = [line for line in stats.splitlines() if line.startswith(f"{self.pid} (")]
        return any(
            state in "Tt" and start_ticks == self.start_ticks
            for state, start_ticks in map(_parsed, lines)
        )

    def _ended_with_its_boot(self) -> bool:
        """Return whether this host has rebooted since; another one may have the same name. A job is
        judged by Slurm: nodes of two clusters may be copies of one installation."""
        return not self.slurm_job and self.machine_id != "" and self.machine_id == _machine_id()

    def _runs_here(self) -> bool:
        seen = _state_and_start(self.pid)
        if seen is None:
            return _is_hidden(self.pid)
        state, start_ticks = seen
        return state not in "ZX" and start_ticks == self.start_ticks

    def _may_be(self, proc: Path) -> bool:
        """Return whether the process of this directory, /proc/NUMBER, may be this one, as seen from
        outside of its pid namespace. Which namespace another user's process is in may not be readable."""
        with suppress(FileNotFoundError, ProcessLookupError):
            pids = re.search(r"^NSpid:(.*)$", (proc / "status").read_text(), re.MULTILINE)
            inner = pids[1].split()[1:] if pids else []  # behind the pid in this namespace
            if not inner or int(inner[-1]) != self.pid:
                return False
            with suppress(PermissionError):
                return _pid_namespace(proc.name) == self.pid_namespace
            return True
        return False


def boot_id() -> str:
    """A random number that is new at each boot of this host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _machine_id() -> str:
    """A digest of /etc/machine-id, which itself is to stay on its machine (man 5 machine-id)."""
    with suppress(OSError):
        if machine_id := Path("/etc/machine-id").read_text().strip():
            return hashlib.sha256(f"forge {machine_id}".encode()).hexdigest()[:16]
    return ""


def _pid_namespace(pid: str) -> int:
    return Path(f"/proc/{pid}/ns/pid").stat().st_ino


def _sees_all() -> bool:
    """Return whether /proc shows the processes of other users, too (mount option hidepid)."""
    return os.access("/proc/1/status", os.R_OK)


def _state_and_start(pid: int) -> tuple[str, int] | None:
    """State and start ticks, fields 3 and 22 of /proc/PID/stat (man 5 proc); None without a process, and
    for another user's that /proc hides (hidepid 2), or shows and lets nobody read (1)."""
    try:
        return _parsed(Path(f"/proc/{pid}/stat").read_text(errors="replace"))
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        return None


def _parsed(stat: str) -> tuple[str, int]:
    # Field 2, the name in brackets, may contain blanks and brackets.
    fields = stat.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _is_hidden(pid: int) -> bool:
    """Return whether there is a process with this pid, of which /proc tells nothing (hidepid): another
    user's, or one's own of another group (newgrp)."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except ProcessLookupError:
        return False
    return True


_libc = ctypes.CDLL(None, use_errno=True)


def stop_with_parent(number: int = signal.SIGTERM) -> None:
    """Ask the kernel for this signal when the parent dies, so that kill -9 leaves no orphans."""
    _libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def run_within(
    seconds: float,
    command: Sequence[str],
    *,
    cwd: str | Path,
    environment: Mapping[str, str],
    output: IO[bytes],
    grace_sec: float = 0.0,
) -> int | None:
    """Exit status of a command; None where it did not end in so many seconds. However this ends, nothing
    that it has started is left: it gets SIGTERM and grace_sec, if any, then its session is killed.

    output: of both streams. A file, no pipe: a process that is left would hold it open. Raises OSError
    where the command cannot be started.
    """
    child = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=stop_with_parent,  # noqa: PLW1509  one system call
    )
    try:
        with suppress(subprocess.TimeoutExpired):
            return child.wait(seconds)
        return None
    finally:
        if grace_sec:
            with suppress(subprocess.TimeoutExpired):
                child.terminate()
                child.wait(grace_sec)
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def raise_open_files() -> int:
    """Let this process, and those that it starts, open as many files as the system allows; their number.

    A rank has a connection to each other one in several groups: 320 ranks need more than the 1,024 that
    a shell usually gives.
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (MAX_OPEN_FILES if n == resource.RLIM_INFINITY else n for n in limits)
    wanted = min(hard, MAX_OPEN_FILES)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, limits[1]))
    return max(soft, wanted)


def limit_core_dumps() -> None:
    """Let this process, and those that it starts, write no core file when they crash: that of a rank on a
    GPU has many GB, and falls into the directory of the project. The hard limit stays, so that a program
    can raise it again."""
    if os.environ.get("FORGE_CORE_DUMPS") != "1":
        _, hard = resource.getrlimit(resource.RLIMIT_CORE)
        resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def in_workflow() -> bool:
    """Return whether Snakemake runs this subcommand. Run by hand, `nohup forge train` must survive its
    shell."""
    return os.environ.get("FORGE_IN_WORKFLOW") == "1"


def user_threads() -> str | None:
    """OMP_NUM_THREADS as the user exported it; Snakemake overwrites the variable for every rule."""
    name = "FORGE_USER_OMP_NUM_THREADS" if in_workflow() else "OMP_NUM_THREADS"
    return os.environ.get(name) or None


@contextmanager
def fast_imports() -> Iterator[None]:
    """Import large packages without garbage collection: torch then takes a sixth less CPU time.

    What was imported stays for good, so that later collections leave it out.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
