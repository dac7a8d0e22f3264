"""The numbers of a run by step, joined from metrics.jsonl and events.jsonl as both grow."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from forge.core import events
from forge.core.events import Event
from forge.core.json_lines import Follower
from forge.core.paths import RunPaths
from forge.trainer import metrics
from forge.trainer.metrics import EvalLine, Line, StepLine, TrainLine

OF_A_STEP = ("loss", "grad_norm", "lr", "tokens_per_sec", "mfu", "tokens")


@dataclass
class StepRow:
    """All numbers of one step, by name. time: seconds since the epoch, of its first line."""

    step: int
    time: float
    values: dict[str, float]


@dataclass
class Rows:
    """Rows of a run, with rising steps.

    Each reader gets the same rows, whenever it begins to read: a row is complete when a line of a later
    step follows. Steps that a resumed launch repeats are passed over, but for the last one: a launch that
    was killed during its evaluation has no validation loss of that step, the next one has. The numbers
    of an event go into the row that is open when it comes, or into the next one.
    """

    paths: RunPaths
    state: str = field(default="running", init=False)
    """State in which the run ended, from its events."""
    _open: StepRow | None = field(default=None, init=False)
    _last: int = field(default=-1, init=False)
    _may_repeat: bool = field(default=False, init=False)
    """Whether a launch that resumes would repeat the last step, as the newest one saved nothing then."""
    _launches: int = field(default=0, init=False)
    _waiting: dict[str, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._metrics = Follower(self.paths.metrics)
        self._events = Follower(self.paths.events)

    def new(self, *, is_over: bool = False) -> Iterator[StepRow]:
        """Rows that are complete now. is_over: the last one counts as complete, too, unless a launch that
        resumes would repeat its step. Raises DataError for an event log of another version of Forge."""
        for entry in heapq.merge(
            self._new_events(), self._new_lines(), key=lambda entry: entry.time
        ):
            if isinstance(entry, Line):
                yield from self._add_line(entry)
            else:
                self._add(entry)
        if is_over and not self._may_repeat:
            yield from self._close()

    def _new_lines(self) -> Iterator[TrainLine | EvalLine | StepLine]:
        while self.paths.metrics.exists() and (lines := self._metrics.new_lines()):
            yield from metrics.parse(lines)

    def _new_events(self) -> Iterator[Event]:
        while self.paths.events.exists() and (lines := self._events.new_lines()):
            for line in lines:
                if event := events.parse(line, self.paths.events):
                    yield event

    def _close(self) -> Iterator[StepRow]:
        if self._open:
            yield self._open
        self._open = None

    def _add_line(self, line: Line) -> Iterator[StepRow]:
        if self._open and line.step == self._open.step:
            self._open.values = values_of(line) | self._open.values  # a repeated number is not new
        elif line.step > self._last:
            yield from self._close()
            self._open = StepRow(line.step, line.time, {**self._waiting, **values_of(line)})
            self._last = line.step
            self._waiting = {}

    def _add(self, event: Event) -> None:
        is_launch = isinstance(event, events.Launch)
        self._launches += is_launch
        self._may_repeat = is_launch or (self._may_repeat and not _is_last_of_its_step(event))
        if isinstance(event, events.End):
            self.state = ": ".join(filter(None, (event.words, event.text)))
        elif is_launch:
            self.state = "running"
        into = self._open.values if self._open and not is_launch else self._waiting
        into |= self._numbers(event)

    def _numbers(self, event: Event) -> dict[str, float]:
        match event:
            case events.Launch():
                return {
                    "run/launches": self._launches,
                    "run/resumed_from": event.step,
                    "run/world_size": event.world_size,
                }
            case events.Save():
                return {
                    "checkpoint/step": event.step,
                    "checkpoint/seconds": event.seconds,
                    "checkpoint/stall": event.stall,
                }
            case events.Skipped():
                return {"train/skipped_in_a_row": event.in_a_row}
        return {}


def values_of(line: Line) -> dict[str, float]:
    """The numbers of a line of metrics.jsonl, by name; those that were not finite are left out."""
    if isinstance(line, TrainLine):
        values = {f"train/{name}": getattr(line, name) for name in OF_A_STEP}
    elif isinstance(line, EvalLine):
        values = {"val/loss": line.loss, "val/bits_per_byte": line.bpb}
        values |= {f"val/loss/{name}": loss for name, loss in (line.sources or {}).items()}
    else:
        values = {"train/step": line.step}
    return {name: float(value) for name, value in values.items() if value is not None}


def _is_last_of_its_step(event: Event) -> bool:
    """Return whether the run has ended so that a rerun of the same command repeats no step."""
    return isinstance(event, events.End) and (event.saved_step is not None or event.fails_again)
