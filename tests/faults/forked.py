"""Commands in children of a process that has torch loaded; their ranks are forked, not launched.

What runs is the product: the command, `run_ranks`, and `forge.worker` in each rank. In the place of
torchrun stands `ForkedRanks`, so that a start takes a tenth of a second. The children come from
Python's fork server, which has imported torch and never computed: OpenMP does not survive a fork.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import psutil
from injection import Fault, Injector
from support.processes import running

DEADLINE_SEC = 60.0
SAMPLES = "samples.jsonl"  # in the run's folder: what each rank trained on, and in which start
# The others say within this time that a rank has failed; the product gives a cluster longer.
AFTER_FAILURE_SEC = 1.0

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(
    [
        *("forge.trainer.loop", "forge.run.train", "forge.cli", "forge.worker", "forked"),
        # What a rank would import in its own time, seconds of it.
        *("torch._inductor", "numpy.random", "numpy.ma"),
    ]
)


def start_server() -> None:
    """Start the fork server, which keeps the environment of this moment."""
    forkserver.ensure_running()


@dataclass(frozen=True)
class Plan:
    """What shall happen to one command: faults in its first start of ranks, or in every one."""

    faults: tuple[Fault, ...] = ()
    every_start: bool = False
    poison: str = ""  # a key of POISONS, put into one rank
    poison_step: int = 0
    poison_rank: int = 0
    points: bool = False  # write down each point that is reached


@dataclass
class Ended:
    """How a command ended: its exit code, negative for a signal, and what it said."""

    code: int
    text: str
    seconds: float


@dataclass
class Command:
    """A command under way. `session`: it and all its ranks, and nothing else."""

    process: Any
    output: Path
    started: float = field(default_factory=time.monotonic)

    def end(self, deadline_sec: float = DEADLINE_SEC) -> Ended:
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
        return Ended(self.process.exitcode, text, time.monotonic() - self.started)

    def _left(self, patience_sec: float) -> list[psutil.Process]:
        end = time.monotonic() + patience_sec
        while (left := session(self.process.pid)) and time.monotonic() < end:
            psutil.wait_procs(left, timeout=0.1)
        return left


def session(leader: int) -> list[psutil.Process]:
    """The living processes of a session."""
    found = []
    for process in running():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            here = os.getsid(process.pid) == leader
            if here and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def start(arguments: list[str], output: Path, plan: Plan | None = None) -> Command:
    """Start `forge ARGUMENTS` in a child."""
    output.parent.mkdir(parents=True, exist_ok=True)
    process = _server.Process(target=_command, args=(arguments, output, plan or Plan()))
    process.start()
    return Command(process, output)


# --- in the children ------------------------------------------------------------------------------


def _command(arguments: list[str], output: Path, plan: Plan) -> None:
    os.setsid()
    with open(output, "a") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    from forge import cli
    from forge.launch import launcher

    launcher._start = partial(ForkedRanks, plan, _Count())  # type: ignore[assignment]
    launcher.AFTER_FAILURE_SEC = AFTER_FAILURE_SEC
    code = cli.main(arguments)
    sys.stderr.flush()
    os._exit(code)


@dataclass
class _Count:
    starts: int = 0


class ForkedRanks:
    """What launcher.py needs of the Popen of torchrun, over ranks that are forked from here."""

    def __init__(
        self, plan: Plan, count: _Count, command: list[str], log: Path, _environment: object
    ) -> None:
        from forge.core.process import free_port
        from forge.launch.rank_records import LaunchSpec

        spec_path = Path(command[-1])
        world_size = LaunchSpec.read(spec_path).layout.world_size
        facts = {"WORLD_SIZE": str(world_size)}
        if world_size > 1:
            facts |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        armed = plan if count.starts == 0 or plan.every_start else Plan(points=plan.points)
        count.starts += 1
        started = time.time()
        self._codes: dict[int, int | None] = {}
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                mine = facts | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                _be_rank(mine, spec_path, armed, started)
            self._codes[pid] = None
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

    def wait(self) -> None:
        while self.poll() is None:
            time.sleep(0.01)

    def send_signal(self, number: int) -> None:
        for pid, code in self._codes.items():
            if code is None:
                os.kill(pid, number)


def _be_rank(facts: dict[str, str], spec_path: Path, plan: Plan, started: float) -> None:
    """One rank, from here to its end. facts: its environment."""
    code = 1
    try:
        os.environ.update(facts)
        arm(plan, int(facts["RANK"]), spec_path.parents[2], started)
        from forge.worker import main

        code = main(str(spec_path))
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def arm(plan: Plan, rank: int, run: Path, started: float) -> None:
    """Make the plan happen in this process, and let it write down what it trains on.

    started: tells this start of ranks from earlier and later ones, the same on all of them.
    """
    from forge.core import failpoints

    injector = Injector(list(plan.faults), rank, run)
    failpoints.hook = _noting(injector, run) if plan.points else injector
    if plan.poison and rank == plan.poison_rank:
        POISONS[plan.poison](plan.poison_step)
    _record_samples(rank, run, started)


def _noting(hook: Callable[[str, Path | None], None], run: Path) -> Callable[..., None]:
    def noting(point: str, path: Path | None) -> None:
        _append(run / "points.jsonl", point)
        hook(point, path)

    return noting


def _record_samples(rank: int, run: Path, started: float) -> None:
    from forge.data.loader import Loader

    batch = Loader.batch

    def recorded(self: Loader, step: int) -> Any:
        tensors = batch(self, step)
        numbers = self.sample_numbers(step)[0].tolist()
        contents = [zlib.crc32(row.numpy().tobytes()) for row in tensors[0]]
        line = {"start": started, "rank": rank, "step": step + 1}
        _append(run / SAMPLES, {**line, "numbers": numbers, "contents": contents})
        return tensors

    Loader.batch = recorded  # type: ignore[method-assign]


def _append(path: Path, value: object) -> None:
    # A full disk is the product's to tell of.
    with contextlib.suppress(OSError), open(path, "a") as file:
        file.write(json.dumps(value) + "\n")


# --- poisons: numbers that are not finite, and what one rank alone sees ----------------------------


def _nan_gradient(step: int) -> None:
    """One gradient is NaN after the backward pass of this step, whose loss is finite."""
    import torch

    from forge.data.loader import Loader
    from forge.trainer.llama import Decoder

    batch, forward, steps = Loader.batch, Decoder.forward, [0]
    hooks: list[Any] = []

    def noted(self: Loader, number: int) -> Any:
        steps.append(number + 1)
        return batch(self, number)

    def poisoned(self: Decoder, *arguments: Any) -> Any:
        if self.training and steps[-1] == step:
            parameter = next(self.parameters())
            hook = parameter.register_hook(lambda gradient: gradient * torch.nan)
            hooks.append(hook)
        elif hooks:
            hooks.pop().remove()
        return forward(self, *arguments)

    Loader.batch = noted  # type: ignore[method-assign]
    Decoder.forward = poisoned  # type: ignore[assignment, method-assign]


def _infinite_moment(step: int) -> None:
    """One moment of AdamW is infinite after this step: weights and losses are still finite."""
    import torch

    update, updates = torch.optim.AdamW.step, itertools.count(1)

    def poisoned(self: torch.optim.AdamW, *arguments: Any) -> Any:
        done = update(self, *arguments)
        if next(updates) == step:
            next(iter(self.state.values()))["exp_avg_sq"].view(-1)[0] = torch.inf
        return done

    torch.optim.AdamW.step = poisoned  # type: ignore[assignment, method-assign]


def _slow_to_fail(_step: int) -> None:
    """This rank's save tells the others that it failed, and ends a while after theirs."""
    from forge.launch.process_group import World

    together = World.together

    def slow(self: World, *arguments: Any) -> Any:
        try:
            return together(self, *arguments)
        except Exception:
            if threading.current_thread().name.startswith("save-"):
                time.sleep(0.5)
            raise

    World.together = slow  # type: ignore[assignment, method-assign]


def _no_memory(_step: int) -> None:
    """This rank alone finds no room for a copy of the state."""
    from forge.checkpoint import async_saver

    async_saver.available_memory = lambda: 0


def _old_view(_step: int) -> None:
    """This rank alone still sees the `latest` before the last one, as a network file system may."""
    from forge.checkpoint import directory
    from forge.core.paths import RunPaths

    def old(paths: RunPaths) -> directory.Checkpoint:
        return directory.Checkpoint.open(directory.committed(paths.checkpoints)[-2])

    directory.latest = old  # type: ignore[assignment]


def _no_compiler(_step: int) -> None:
    """The compiler fails on this rank alone, as it comes to the first forward."""
    import torch

    def compile_and_fail(model: torch.nn.Module, **_: Any) -> torch.nn.Module:
        def fail(*_: Any) -> None:
            raise RuntimeError("the compiler fails here")

        wrapper = torch.nn.ModuleList([model])
        wrapper.forward = fail  # type: ignore[assignment]
        return wrapper

    torch.compile = compile_and_fail  # type: ignore[assignment]


POISONS = {
    "no-compiler": _no_compiler,
    "no-memory": _no_memory,
    "old-view": _old_view,
    "slow-to-fail": _slow_to_fail,
    "nan-gradient": _nan_gradient,
    "infinite-moment": _infinite_moment,
}
