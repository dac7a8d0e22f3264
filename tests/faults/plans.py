"""What shall happen to the forked ranks of a command, and what they write down of their way."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from injection import Fault, Injector
from support.forked import RankStart

SAMPLES = "samples.jsonl"  # in the run's folder: what each rank trained on, and in which start


@dataclass(frozen=True)
class Plan:
    """What shall happen to one command: faults in its first start of ranks."""

    faults: tuple[Fault, ...] = ()
    poison: str = ""  # a key of POISONS, put into one rank
    poison_step: int = 0
    poison_rank: int = 0
    points: bool = False  # write down each point that is reached
    ahead: bool = False  # results are read a step late, as on GPUs with NCCL
    slowest_disk_sec: float = 0  # in place of the product's hour, if any

    def arm(self, start: RankStart) -> None:
        """Make it happen in this process, and let it write down what it trains on."""
        from forge.core import failpoints

        strikes = start.launch == 0
        injector = Injector(list(self.faults) if strikes else [], start.rank, start.run)
        failpoints.hook = _noting(injector, start.run) if self.points else injector
        if strikes and self.poison and start.rank == self.poison_rank:
            POISONS[self.poison](self.poison_step)
        if self.ahead:
            from forge.launch.process_group import World

            World.runs_ahead = True  # type: ignore[assignment,method-assign]
        if self.slowest_disk_sec:
            from forge.launch import process_group

            process_group.SLOWEST_DISK_SEC = self.slowest_disk_sec
        _record_samples(start)


def _noting(hook: Callable[[str, Path | None], None], run: Path) -> Callable[..., None]:
    def noting(point: str, path: Path | None) -> None:
        _append(run / "points.jsonl", point)
        hook(point, path)

    return noting


def _record_samples(start: RankStart) -> None:
    from forge.data.loader import Loader

    batch = Loader.batch

    def recorded(self: Loader, step: int) -> Any:
        tensors = batch(self, step)
        numbers = self.sample_numbers(step)[0].tolist()
        contents = [zlib.crc32(row.numpy().tobytes()) for row in tensors[0]]
        line = {"start": start.time, "rank": start.rank, "step": step + 1}
        _append(start.run / SAMPLES, {**line, "numbers": numbers, "contents": contents})
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
    from forge.trainer.models.decoder import Decoder

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

    def compile_and_fail(_: Callable[..., Any], **__: Any) -> Callable[..., Any]:
        def fail(*_: Any) -> None:
            raise RuntimeError("the compiler fails here")

        return fail

    torch.compile = compile_and_fail  # type: ignore[assignment]


POISONS = {
    "no-compiler": _no_compiler,
    "no-memory": _no_memory,
    "old-view": _old_view,
    "slow-to-fail": _slow_to_fail,
    "nan-gradient": _nan_gradient,
    "infinite-moment": _infinite_moment,
}
