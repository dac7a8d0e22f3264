"""Commands and ranks in children of a process that has torch loaded: forked, not launched.

What runs is the product: the command, `run_ranks`, and `forge.worker` in each rank. In the place of
torchrun stands `ForkedRanks`, so that a start takes a tenth of a second. The children come from
Python's fork server, which has imported torch and never computed: OpenMP does not survive a fork.
That launched ranks do the same is the promise of tests/faults/test_real_launches.py and
tests/distributed/test_interruptions.py.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
from support.processes import Outcome, running

DEADLINE_SEC = 60.0
# The others say within this time that a rank has failed; the product gives a cluster longer.
AFTER_FAILURE_SEC = 1.0
# Left over from a launcher around the tests, the first five would mislead every rank; by the last one
# tests find the processes that they launched, and the fork server is none of them.
LEFT_OVER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "FORGE_TESTS")

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(
    [
        *("forge.trainer.loop", "forge.run.train", "forge.cli", "forge.worker"),
        *("forge.validation.validate", "forge.validation.replay_rank", "support.forked"),
        # What a rank would import in its own time, seconds of it.
        *("torch._inductor", "numpy.random", "numpy.ma"),
    ]
)
_leaders: set[int] = set()  # of the sessions that were started here


@dataclass(frozen=True)
class RankStart:
    """One rank as it starts, in its own process."""

    rank: int
    run: Path
    launch: int  # of the ranks, by this command, from 0
    time: float  # of the launch, the same on all ranks


# Called in each rank before forge.worker: what shall happen to it. Something that can be pickled.
Arm = Callable[[RankStart], None]


@dataclass
class Command:
    """A command under way. `session`: it and all its ranks, and nothing else."""

    process: Any
    output: Path
    started: float = field(default_factory=time.monotonic)

    def end(self, deadline_sec: float = DEADLINE_SEC) -> Outcome:
        """Wait for it. Fails, and ends all of it, when it takes too long or leaves somebody behind."""
        self.process.join(deadline_sec)
        hangs = self.process.is_alive()
        left = self._left(0.0 if hangs else 5.0)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.join(DEADLINE_SEC)
        text = self.output.read_text(errors="replace")
        assert not hangs, f"it still runs after {deadline_sec:g} s:\n{text}"
        assert not left, f"left running: {left}\n{text}"
        return Outcome(self.process.exitcode, text, time.monotonic() - self.started)

    def kill(self) -> Outcome:
        """`kill -9` to it and to all its ranks at once."""
        for process in session(self.process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return self.end()

    def _left(self, patience_sec: float) -> list[psutil.Process]:
        end = time.monotonic() + patience_sec
        while (left := session(self.process.pid)) and time.monotonic() < end:
            psutil.wait_procs(left, timeout=0.1)
        return left


def session(*leaders: int) -> list[psutil.Process]:
    """The living processes of these sessions."""
    found = []
    for process in running():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            here = os.getsid(process.pid) in leaders
            if here and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def living() -> list[psutil.Process]:
    """The living processes of all commands and launches that were started here."""
    found = session(*_leaders)
    _leaders.intersection_update([os.getsid(process.pid) for process in found])
    return found


def start(
    arguments: list[str],
    output: Path,
    arm: Arm | None = None,
    before: Callable[[], None] | None = None,
) -> Command:
    """Start `forge ARGUMENTS` in a child. before: called there first, something that can be pickled."""
    output.parent.mkdir(parents=True, exist_ok=True)
    return Command(_start(_command, arguments, output, arm, before), output)


@contextlib.contextmanager
def forked_launches() -> Iterator[None]:
    """Commands in this process launch ranks that are forked, too."""
    from forge.launch import launcher

    with mock.patch.object(launcher, "_start", Launched):
        yield


def _start(target: Callable[..., None], *arguments: object) -> Any:
    process = _server.Process(target=_lead, args=(target, *arguments))
    # The first start also starts the server, which keeps the environment of this moment.
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):  # more would wait spinning
        for name in LEFT_OVER:
            os.environ.pop(name, None)
        process.start()
    _leaders.add(process.pid)
    return process


class Launched:
    """What launcher.py needs of the Popen of torchrun, in a process that must not fork itself."""

    def __init__(self, command: list[str], log: Path, _environment: object) -> None:
        self._process = _start(_launch, command, log, dict(os.environ))
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode  # type: ignore[no-any-return]

    def wait(self, timeout: float | None = None) -> None:
        self._process.join(timeout)
        if self._process.is_alive():
            raise subprocess.TimeoutExpired("forked ranks", timeout or 0)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


# --- in the children ------------------------------------------------------------------------------


def _lead(target: Callable[..., None], *arguments: object) -> None:
    os.setsid()
    target(*arguments)


def _write_to(file: Path) -> None:
    with open(file, "a") as output:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output.fileno(), stream.fileno())


def _command(
    arguments: list[str], output: Path, arm: Arm | None, before: Callable[[], None] | None
) -> None:
    _write_to(output)
    if before:
        before()
    from forge import cli
    from forge.launch import launcher

    launcher._start = partial(ForkedRanks, arm, _Count())  # type: ignore[assignment]
    launcher.AFTER_FAILURE_SEC = AFTER_FAILURE_SEC
    code = cli.main(arguments)
    sys.stderr.flush()
    os._exit(code)


def _launch(command: list[str], log: Path, environment: dict[str, str]) -> None:
    """In the place of torchrun: start the ranks, pass signals on, wait for all."""
    _write_to(log)
    os.environ.clear()
    os.environ.update(environment)
    ranks = ForkedRanks(None, _Count(), command, log, None)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, lambda received, _: ranks.send_signal(received))
    ranks.wait()
    os._exit(ranks.poll() or 0)


@dataclass
class _Count:
    launches: int = 0


class ForkedRanks:
    """What launcher.py needs of the Popen of torchrun, over ranks that are forked from here."""

    def __init__(
        self, arm: Arm | None, count: _Count, command: list[str], _log: Path, _environment: object
    ) -> None:
        from forge.core.process import free_port
        from forge.launch.rank_records import LaunchSpec

        spec_path = Path(command[-1])
        world_size = LaunchSpec.read(spec_path).layout.world_size
        facts = {"WORLD_SIZE": str(world_size)}
        if world_size > 1:
            facts |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        started = time.time()
        self._codes: dict[int, int | None] = {}
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                begun = RankStart(rank, spec_path.parents[2], count.launches, started)
                _be_rank(begun, facts, spec_path, arm)
            self._codes[pid] = None
        count.launches += 1
        self.pid = next(iter(self._codes))

    def poll(self) -> int | None:
        """The worst exit status once all have ended. A lone rank that was stopped is continued."""
        for pid in [pid for pid, code in self._codes.items() if code is None]:
            ended, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if not ended:
                continue
            if not os.WIFSTOPPED(status):
                self._codes[pid] = os.waitstatus_to_exitcode(status)
            elif len(self._codes) == 1:
                os.kill(pid, signal.SIGCONT)
        codes = list(self._codes.values())
        return None if None in codes else max(map(abs, codes))  # type: ignore[arg-type]

    def wait(self, timeout: float | None = None) -> None:
        end = time.monotonic() + (timeout or math.inf)
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("forked ranks", timeout or 0)
            time.sleep(0.01)

    def send_signal(self, number: int) -> None:
        for pid, code in self._codes.items():
            if code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)


def stop_before_a_step(_start: RankStart) -> None:
    """An `Arm`: SIGTERM to each rank once it has its handlers, before it joins the others."""
    from forge import worker

    prepare = worker._prepare

    def stop_and_prepare(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        prepare(*arguments)

    worker._prepare = stop_and_prepare


def _be_rank(begun: RankStart, facts: dict[str, str], spec_path: Path, arm: Arm | None) -> None:
    """One rank, from here to its end. facts: its environment, but for its own number."""
    code = 1
    try:
        os.environ.update(facts, RANK=str(begun.rank), LOCAL_RANK=str(begun.rank))
        if arm:
            arm(begun)
        from forge.worker import main

        code = main(str(spec_path))
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
