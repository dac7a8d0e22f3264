"""The files of a run: its events, last steps, goal, and the process that holds its lock."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from pydantic import ValidationError

from forge.checkpoint.checkpoints import RunCheckpoints
from forge.checkpoint.resume import CommittedCheckpoints
from forge.checkpoint.sealed import ProgramCheckpoints
from forge.core import events
from forge.core.errors import DataError, ForgeError
from forge.core.events import Event
from forge.core.files import read_object_or_empty
from forge.core.paths import RunPaths
from forge.core.process import Process
from forge.core.program_settings import Program
from forge.core.records import Lock
from forge.hosts.lock import LOCK, WORKFLOW_LOCK, holder
from forge.trainer import metrics
from forge.trainer.metrics import EvalLine, StepLine, TrainLine

TEXTS = ("run", "results", "data", "parent")  # keys of a config that are not sections
METRICS_BYTES = 2**16  # some 300 lines of metrics.jsonl, for the newest step and the rate

T = TypeVar("T")


def _read(read: Callable[[], T], without: T) -> tuple[T, ForgeError | None]:
    """The result of `read`; `without` and the reason where that cannot be read."""
    try:
        return read(), None
    except ForgeError as err:
        return without, err


@dataclass
class RunFiles:
    """The contents of a run's files. Each file is read once, at its first use."""

    paths: RunPaths
    now: float = field(default_factory=time.time)

    @cached_property
    def _log(self) -> tuple[list[Event], ForgeError | None]:
        return _read(lambda: events.read(self.paths.events), [])

    @property
    def log(self) -> list[Event]:
        """All events; none where the log cannot be read, or is of another version of Forge."""
        return self._log[0]

    @property
    def trouble(self) -> ForgeError | None:
        """Why the event log, the lock or the metrics cannot be read."""
        return self._log[1] or self._lock[1] or self._lines[1]

    @cached_property
    def launches(self) -> list[events.Launch]:
        return [event for event in self.log if isinstance(event, events.Launch)]

    @property
    def world_sizes(self) -> list[tuple[int, int]]:
        """(step, world size) of each launch that began with another world size than the one before."""
        sizes: list[tuple[int, int]] = []
        for launch in self.launches:
            if not sizes or sizes[-1][1] != launch.world_size:
                sizes.append((launch.step, launch.world_size))
        return sizes

    @property
    def shrunk(self) -> str:
        """Such as `on 2 of 3 nodes since step 40, without node02`, where the newest launch has fewer
        nodes than the first one of this start of its job; else ""."""
        newest = self.launches[-1] if self.launches else None
        if newest is None or newest.job is None:
            return ""
        start = (newest.job, newest.restart)
        launches = [one for one in self.launches if (one.job, one.restart) == start]
        whole, now = launches[0].nodes, newest.nodes
        if len(now) >= len(whole):
            return ""
        step = next(one.step for one in launches if len(one.nodes) == len(now))
        without = ", ".join(name for name in whole if name not in now)
        return f"on {len(now)} of {len(whole)} nodes since step {step}, without {without}"

    @cached_property
    def _lines(self) -> tuple[list[TrainLine | EvalLine | StepLine], ForgeError | None]:
        return _read(lambda: metrics.read_last(self.paths.metrics, METRICS_BYTES), [])

    @cached_property
    def steps(self) -> list[TrainLine | StepLine]:
        """The last training steps that were logged, oldest first."""
        return [line for line in self._lines[0] if isinstance(line, TrainLine | StepLine)]

    @cached_property
    def steps_of_launch(self) -> list[TrainLine | StepLine]:
        """The steps of the newest launch."""
        name = self.launches[-1].launch if self.launches else None
        return [step for step in self.steps if step.launch == name]

    def last(self, *kinds: type[Event], since: float = 0.0) -> Any:
        """The newest event of these kinds; None without one."""
        return events.last([event for event in self.log if event.time >= since], *kinds)

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json; {} where it was not written yet. Without what no config of Forge has there."""
        values = read_object_or_empty(self.paths.config)
        return {k: v for k, v in values.items() if isinstance(v, str if k in TEXTS else dict)}

    @cached_property
    def goal(self) -> int | None:
        if self.program:
            return self.program.goal_step or None
        steps = self.config.get("train", {}).get("max_steps")
        return steps if isinstance(steps, int) else None

    @cached_property
    def program(self) -> Program | None:
        """The program of the config in place of Forge's own trainer."""
        values = self.config.get("program")
        with suppress(ValidationError):
            return Program.model_validate(values) if values else None
        return None

    @property
    def checkpoints(self) -> RunCheckpoints:
        if self.program:
            return ProgramCheckpoints(self.paths, self.program.checkpoints)
        return CommittedCheckpoints(self.paths)

    @cached_property
    def step(self) -> int | None:
        """The newest step that was logged, committed or resumed from."""
        ends = [
            end for end in self.log if isinstance(end, events.End) and end.saved_step is not None
        ]
        newest = (self.last(events.Init), self.last(events.Save), *ends[-1:])
        known = [(event.time, event.step) for event in newest if event]
        known += self._saved
        known += [(line.time, line.step) for line in self.steps[-1:]]
        return max(known)[1] if known else None

    @property
    def _saved(self) -> list[tuple[float, int]]:
        """Time of the last save of the newest launch, and its newest step: of two checkpoints of another
        program that are complete at once, the newer one is sealed first. [] without a save."""
        begun = self.last(events.Launch, events.Init)
        since = begun.time if begun else 0.0
        saves = [e for e in self.log if isinstance(e, events.Save) and e.time >= since]
        return [(saves[-1].time, max(save.step for save in saves))] if saves else []

    @cached_property
    def rate(self) -> float | None:
        """Steps per second of this launch, with its evaluations and saves."""
        if not self.steps_of_launch:
            return None
        first, last = self.steps_of_launch[0], self.steps_of_launch[-1]
        seconds = last.time - first.time
        return (last.step - first.step) / seconds if seconds > 0 else None

    @cached_property
    def _lock(self) -> tuple[Lock | None, ForgeError | None]:
        return _read(lambda: holder(self.paths.root), None)

    @property
    def lock(self) -> Lock | None:
        """The holder of the run's lock; None also where the lock cannot be read, or is of another version
        of Forge."""
        return self._lock[0]

    @cached_property
    def snakemake(self) -> Lock | None:
        """The other living Snakemake that looks after the run, if any; not one of another version."""
        with suppress(DataError):
            held = holder(self.paths.root, WORKFLOW_LOCK)
            if held and held.process.life() == "alive" and held.process != Process.current():
                return held
        return None

    @cached_property
    def lock_since(self) -> float:
        try:
            return (self.paths.root / LOCK).stat().st_mtime
        except FileNotFoundError:
            return self.now

    @property
    def job_ids(self) -> set[str]:
        """Jobs that the files name: of the lock, else of the newest launch."""
        named = self.lock and self.lock.slurm_job
        named = named or (self.launches[-1].job if self.launches else None)
        return {named} if named else set()

    @property
    def last_sign_of_life(self) -> float:
        times = [event.time for event in self.log[-1:]] + [line.time for line in self.steps[-1:]]
        return max(times, default=self.lock_since)
