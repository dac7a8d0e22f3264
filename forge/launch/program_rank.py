"""One rank of another training program: its environment, its process, its heartbeat. No torch.

Runs in the rank's process, which starts the program as its only child, passes a stop on, and writes the
rank record. What the record stands for is decided by the launcher's side, see run/other_program.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from forge.core.errors import ConfigError, Exit, UnfitError
from forge.core.files import disk_trouble
from forge.core.json_lines import last_lines
from forge.core.paths import RunPaths
from forge.core.process import free_port, hostname, stop_with_parent
from forge.core.program_settings import Program, filled
from forge.core.terminal import duration, say, unstamped, write
from forge.launch.launcher import register
from forge.launch.lost_ranks import PEER_LOST
from forge.launch.rank import Rank
from forge.launch.rank_output import RankProgress, send_log
from forge.launch.rank_records import (
    STOP_ASKED,
    LaunchSpec,
    ProgramFolders,
    ProgramTask,
    RankRecord,
)
from forge.launch.stop_signal import StopFlag

POLL_SEC = 0.1
KILL_SEC = 30.0  # for the end of a killed program, whose GPU the driver may have to reset
SHARED_SEC = 1.0  # between two looks at files on the shared file system
UNWATCHED_SEC = (
    60.0  # without a look the job was suspended, or the file system away: no sign of a hang
)
# Exit status by which a program asks not to be started again (NVIDIA's resiliency extension uses it too).
NO_RESTART = 93
TAIL_BYTES = 4096
VICTIM_SEC = 5.0  # a rank that only waits for a hung rank reports so much later than the hung rank

Signs = tuple[tuple[int, int], ...]  # time of last change and size of each of some files


def heartbeat_file(program: Program, paths: RunPaths, rank: int) -> Path:
    """The file that this rank of the program touches, or writes its step into."""
    template = program.heartbeat and program.heartbeat.file
    if template:
        return Path(filled(template, {"run": paths.root.absolute(), "rank": rank}))
    return paths.heartbeats.absolute() / str(rank)


def running_file(paths: RunPaths, rank: int) -> Path:
    """The file in which a rank writes for how many seconds its program has been running."""
    return paths.heartbeats / f"{rank}.running"


def saved_file(paths: RunPaths, rank: int) -> Path:
    """The file into which a rank writes the step of the last checkpoint that it has written its part
    of."""
    return paths.heartbeats.absolute() / f"{rank}.saved"


def output_file(paths: RunPaths) -> Path:
    """The file that a rank touches when its program has printed something, for the other ranks to see."""
    return paths.heartbeats / "output"


def read_step(path: Path) -> int | None:
    """The step in a heartbeat file; None without one."""
    try:
        words = path.read_text().split()
    except (OSError, UnicodeDecodeError):
        return None
    return int(words[-1]) if words and words[-1].isdecimal() else None


def run(spec: LaunchSpec, paths: RunPaths, rank: Rank, stop: StopFlag) -> RankRecord:
    """Run the program to its end; the record of this rank. Raises ConfigError where it cannot start."""
    task = spec.task
    assert isinstance(task, ProgramTask)
    if rank.is_main:
        _show_output(spec)
    folders = _folders(task)
    variables = rank_variables(spec, task, folders, paths, rank)
    values = {name.removeprefix("FORGE_").lower(): value for name, value in variables.items()}
    words = [*task.program.command, *(task.program.resume if task.resume else [])]
    command = [filled(word, values) for word in words]
    write(f"starting: {command}", sys.stdout)
    beat = heartbeat_file(task.program, paths, rank.rank)
    with disk_trouble(beat):
        beat.parent.mkdir(parents=True, exist_ok=True)
    child = _start(command, folders.cwd, task, variables)
    register(spec, f"rank-{rank.rank}.program", child.pid)
    return _Watch(spec, task, paths, rank, stop, child, beat).until_it_ends()


def _folders(task: ProgramTask) -> ProgramFolders:
    """The directories that this rank reads: copies on this node's disk, unless they have disappeared."""
    staged = task.staged.get(hostname(), task.shared)
    if not staged.unreadable or staged == task.shared:
        return staged
    say(f"warning: cannot read {', '.join(staged.unreadable)}, using the shared directories")
    return task.shared


def rank_variables(
    spec: LaunchSpec, task: ProgramTask, folders: ProgramFolders, paths: RunPaths, rank: Rank
) -> dict[str, str]:
    """The variables of the contract for this rank, besides those of network and threads."""
    environ = os.environ
    variables = {
        "RANK": str(rank.rank),
        "LOCAL_RANK": str(rank.local_rank),
        "WORLD_SIZE": str(rank.world_size),
        "LOCAL_WORLD_SIZE": str(rank.local_world_size),
        "NODE_RANK": str(rank.rank // rank.local_world_size),
        "FORGE_RUN": str(paths.root.absolute()),
        "FORGE_CHECKPOINTS": str(paths.checkpoints.absolute()),
        "FORGE_RESUME": task.resume,
        "FORGE_DATA": folders.data,
        "FORGE_HUB": folders.hub,
        "FORGE_GOAL": str(task.goal),
        "FORGE_RESTART": str(task.restart),
        "FORGE_DEADLINE": f"{task.deadline:.0f}" if task.deadline else "",
        "FORGE_HEARTBEAT": str(heartbeat_file(task.program, paths, rank.rank)),
        "FORGE_SAVED": str(saved_file(paths, rank.rank)),
        "FORGE_STOP_SIGNAL": task.program.stop.signal,
        "PYTHONUNBUFFERED": environ.get("PYTHONUNBUFFERED") or "1",
    }
    if rank.world_size == 1:  # no launcher has set them
        variables["MASTER_ADDR"] = environ.get("MASTER_ADDR") or "127.0.0.1"
        variables["MASTER_PORT"] = environ.get("MASTER_PORT") or str(free_port())
    return variables


def _show_output(spec: LaunchSpec) -> None:
    """Let the launcher show the log of this rank, in place of messages of Forge's own trainer."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    send_log(spec.directory, _log())


def _start(
    command: list[str], cwd: str, task: ProgramTask, variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    def before_exec() -> None:
        stop_with_parent()
        if task.program.stop.signal != "SIGUSR1":
            # Where Slurm tracks processes without cgroups, its warning reaches the program, too: it would
            # be killed in the middle of a step, instead of asked to stop.
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    try:
        return subprocess.Popen(
            command,
            cwd=cwd,
            env=_environment(variables),
            stdin=subprocess.DEVNULL,
            process_group=0,  # torchrun signals the group of the rank: the stop would come twice
            preexec_fn=before_exec,  # noqa: PLW1509  no threads run yet
        )
    except OSError as err:
        raise ConfigError(
            f"cannot start {command[0]!r} in {cwd} on {hostname()}: {err.strerror}",
            cause="program.command or program.source is wrong, or the file is not executable",
            fix="correct them; program.command is started without a shell",
        ) from None


def _group_of_living(pid: int) -> int | None:
    """The process group of a process; None where it has ended."""
    try:
        return None if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE else os.getpgid(pid)
    except (psutil.Error, OSError):
        return None


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of this process with these variables. What restricts the staged Python
    (`stage.project`) to its own packages is taken back: the program has the job's PYTHONPATH, and Forge
    behind it."""
    environment = {**os.environ, **variables}
    of_job = environment.pop("FORGE_JOB_PYTHONPATH", None)
    if of_job is not None:
        del environment["PYTHONSAFEPATH"]  # a script imports the modules beside it
        paths = [of_job, environment["PYTHONPATH"]]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return environment


@dataclass
class _Watch:
    """The process of the program: passes a stop on, and ends it when it hangs."""

    spec: LaunchSpec
    task: ProgramTask
    paths: RunPaths
    rank: Rank
    stop: StopFlag
    child: subprocess.Popen[bytes]
    beat: Path
    cause: str = field(default="", init=False)  # of the stop
    hung: str = field(default="", init=False)
    printed: Signs = field(default=(), init=False)  # of its log, as the other ranks know it

    def until_it_ends(self) -> RankRecord:
        started, looked, killed_at = time.monotonic(), 0.0, float("inf")
        progress = self._progress()
        self._last_beat, self._seen = started, self._signs_of_life()
        while self.child.poll() is None:
            now = time.monotonic()
            if now - looked >= SHARED_SEC:
                if looked and now - looked > UNWATCHED_SEC:
                    self._last_beat += now - looked
                looked = now
                with contextlib.suppress(OSError):  # on a full disk the files stay as they are
                    running_file(self.paths, self.rank.rank).write_text(f"{now - started:.0f}")
                self._look_for_hang(now)
                if progress and (step := read_step(self.beat)) is not None:
                    progress(step)
            if not self.cause and (cause := self._stop_cause(look=looked == now)):
                self.cause, killed_at = cause, now + self.task.program.stop.grace_sec
                self._pass_on()
            if now > killed_at or self.hung:
                self._kill()
            time.sleep(POLL_SEC)
        # The program may have ended after the stop before this process looked.
        self.cause = self.cause or self._stop_cause(look=True)
        if self.cause or self.child.returncode:
            self._end_what_it_left()
        return self._record(self.child.returncode)

    def _end_what_it_left(self) -> None:
        """kill -9 of processes that the program has started and not ended: a shell that a signal ends
        leaves its child, which would train on beside the next launch."""
        left = [pid for pid in psutil.pids() if _group_of_living(pid) == self.child.pid]
        if not left:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        say(
            f"warning: the program on {hostname()} has ended and left processes, which were killed:"
            f" {', '.join(map(str, left))}. A script gets the stop in place of the trainer that it"
            " starts: start that with `exec`"
        )

    def _progress(self) -> RankProgress | None:
        goal = self.task.goal
        return (
            RankProgress(self.spec.directory, "train", goal, "steps")
            if goal and self.rank.is_main
            else None
        )

    def _stop_cause(self, *, look: bool) -> str:
        """Why to stop now. look: also read the files on the shared file system."""
        program, deadline = self.task.program, self.task.deadline
        if deadline and time.time() > deadline - program.stop.grace_sec:
            return "deadline"
        asked = self.spec.directory / STOP_ASKED
        if cause := self.stop.cause():
            with contextlib.suppress(OSError):
                asked.write_text(cause)
            return cause
        if look:
            with contextlib.suppress(OSError):
                return asked.read_text()
        return ""

    def _pass_on(self) -> None:
        name = self.task.program.stop.signal
        if name == "none":
            self._kill()
        else:
            self.child.send_signal(signal.Signals[name])

    def _kill(self) -> None:
        """kill -9 of the program and of the processes that it has started. Raises UnfitError when it does
        not end."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        try:
            self.child.wait(KILL_SEC)
        except subprocess.TimeoutExpired:
            raise UnfitError(
                f"the program on {hostname()} has not ended {KILL_SEC:g} s after kill -9:"
                f" pid {self.child.pid}",
                cause="it waits in the kernel, for a file system or a GPU that does not answer",
                fix="leave this node out (slurm.exclude in machine.yaml), or restart it",
            ) from None

    def _signs_of_life(self) -> Signs:
        heartbeat = self.task.program.heartbeat
        if heartbeat is None:
            return ()
        if heartbeat.log == "any":
            self._tell_of_output()
            return _signs(self.beat, output_file(self.paths))
        return _signs(self.beat, _log()) if heartbeat.log else _signs(self.beat)

    def _tell_of_output(self) -> None:
        if (printed := _signs(_log())) != self.printed:
            self.printed = printed
            with contextlib.suppress(OSError):
                output_file(self.paths).touch()

    def _look_for_hang(self, now: float) -> None:
        heartbeat = self.task.program.heartbeat
        if heartbeat is None:
            return
        if (signs := self._signs_of_life()) != self._seen:
            self._seen, self._last_beat = signs, now
        elif now - self._last_beat > heartbeat.timeout_sec:
            step = read_step(self.beat)
            if self._waits_for_another(step) and now - self._last_beat < self._victims_sec:
                return
            at = "" if step is None else f", the last one at step {step}"
            self.hung = f"no heartbeat for {duration(now - self._last_beat)}{at}"

    @property
    def _victims_sec(self) -> float:
        heartbeat = self.task.program.heartbeat
        return (heartbeat.timeout_sec if heartbeat else 0.0) + VICTIM_SEC

    def _waits_for_another(self, step: int | None) -> bool:
        """Return whether another rank is behind this one: this one waits in a collective for it, and the
        other one is to be named."""
        program, paths = self.task.program, self.paths
        ranks = range(self.rank.world_size)
        steps = [read_step(heartbeat_file(program, paths, rank)) for rank in ranks]
        return step is not None and any(other is not None and other < step for other in steps)

    def _record(self, status: int) -> RankRecord:
        record = RankRecord("completed", self.rank.rank, exit_status=status, ended=time.time())
        if self.hung:
            return replace(
                record, status="lost", code=Exit.UNFIT, cause=PEER_LOST, message=self.hung
            )
        if self.cause:
            return replace(record, status="stopped", code=Exit.STOPPED, cause=self.cause)
        if status == 0:
            return record
        said = _last_words() if status > 0 else ""
        record = replace(record, message=f"its program {how_it_ended(status)}{said}")
        if status == NO_RESTART:
            return replace(record, status="failed", code=Exit.FAILED, cause="no restart")
        code = Exit.FAILED if status > 0 else Exit.UNFIT
        return replace(record, status="lost", code=code, cause=PEER_LOST)


def _signs(*paths: Path) -> Signs:
    """Time of change and size of each of the files that exists."""
    signs = []
    for path in paths:
        with contextlib.suppress(OSError):
            status = path.stat()
            signs.append((status.st_mtime_ns, status.st_size))
    return tuple(signs)


def _log() -> Path:
    """The log of this rank, which its output goes to."""
    return Path(f"/proc/self/fd/{sys.stdout.fileno()}").readlink()


def how_it_ended(status: int) -> str:
    """An exit status as a predicate: `exited with 3`."""
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"exited with {status}"


def _last_words() -> str:
    """The last line of this rank's log, which tells the error of most programs."""
    sys.stdout.flush()
    lines, _ = last_lines(_log(), TAIL_BYTES)
    texts = (unstamped(line)[1].strip() for line in reversed(lines))
    said = next(filter(None, texts), "")
    return f": {said[:200]}" if said else ""
