"""Launches of a run, rebuilt from its logs: when each began, how far it came, how it ended.

Both logs are append-only and outlive every restart, so a step may appear in two launches: as first
trained, and as recomputed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from forge.core import events
from forge.core.events import Event
from forge.trainer.metrics import Line

_WHILE_IT_RUNS = (
    *(events.Launch, events.Init, events.Eval, events.Save),
    *(events.Skipped, events.Budget, events.Forecast),
)
_OF_A_LAUNCH = (*_WHILE_IT_RUNS, events.RankError, events.Preempted, events.End)


@dataclass
class LaunchHistory:
    """One start of the ranks, from the first line that carries its id to its recorded end."""

    id: str
    start: float
    log: list[Event] = field(default_factory=list)  # in the order of the file
    metrics: list[Line] = field(default_factory=list)  # in the order of the file
    is_last: bool = False

    def first(self, *kinds: type[Event]) -> Any:
        """The launch's first event of one of these kinds; None without such an event."""
        return next((event for event in self.log if isinstance(event, kinds)), None)

    @property
    def begun(self) -> events.Launch | None:
        """The event of its start; None where its line was cut or edited."""
        return self.first(events.Launch)

    @property
    def ends(self) -> list[events.End]:
        """All that was recorded of its end: a lost rank, then that the job is requeued."""
        return [event for event in self.log if isinstance(event, events.End)]

    @property
    def ending(self) -> events.End | None:
        """The event that ended it; None when it was cut off, or still runs."""
        return self.first(events.End)

    @property
    def is_final(self) -> bool:
        """Return whether only a person launches the run again."""
        return any(end.is_final for end in self.ends)

    @property
    def saves(self) -> list[events.Save]:
        return [event for event in self.log if isinstance(event, events.Save)]

    @cached_property
    def end(self) -> float:
        if self.ending:
            return self.ending.time
        return max([event.time for event in self.log] + [line.time for line in self.metrics])

    @cached_property
    def ready(self) -> float | None:
        """Time at which its ranks were ready to train; None if they never were."""
        if init := self.first(events.Init):
            return init.time
        return next((line.time for line in self.metrics), None)

    @cached_property
    def resumed_step(self) -> int | None:
        """The step it went on from (0: a fresh start); None if it never got there."""
        if init := self.first(events.Init):
            return init.step
        if self.begun and any(line.kind == "step" for line in self.metrics):
            return self.begun.step
        # Without the event: its first line tells that everything from there on was done again.
        first = next((line.step for line in self.metrics if line.kind == "train"), None)
        return None if first is None else max(first - 1, 0)

    @cached_property
    def passed(self) -> list[tuple[int, float]]:
        """(step, when training went on beyond it) of all that was recorded of a step."""
        reached = [(line.step, line.time) for line in self.metrics]
        for event in self.log:
            if isinstance(event, events.Save):
                # Recorded when the checkpoint is committed, steps later.
                reached.append((event.step, event.time - event.seconds + event.stall))
            elif isinstance(event, events.End):
                if event.saved_step is not None:
                    reached.append((event.saved_step, event.time))
            elif isinstance(event, _WHILE_IT_RUNS) and hasattr(event, "step"):
                reached.append((event.step, event.time))
        return reached

    @cached_property
    def last_step(self) -> int:
        return max((step for step, _ in self.passed), default=0)

    @property
    def outcome(self) -> str:
        """End of the launch, for people."""
        if self.ending:
            return ": ".join(filter(None, (self.ending.words, self.ending.reason)))
        return "no end recorded: it still runs or was killed" if self.is_last else "cut off"


def launches_of(log: Iterable[Event], lines: Sequence[Line] = ()) -> list[LaunchHistory]:
    """The launches that the event log of a run tells, and its metrics where they are given. An event that
    names no launch belongs to that of the event before it."""
    launches: dict[str, LaunchHistory] = {}
    name: str | None = None
    for event in log:
        name = getattr(event, "launch", name)
        if name is not None and isinstance(event, _OF_A_LAUNCH):
            launches.setdefault(name, LaunchHistory(name, event.time)).log.append(event)
    for line in lines:
        launches.setdefault(line.launch, LaunchHistory(line.launch, line.time)).metrics.append(line)
    ordered = list(launches.values())
    if lines:  # a launch may be told by its metrics alone
        ordered.sort(key=lambda launch: launch.start)
    for launch in ordered[-1:]:
        launch.is_last = True
    return ordered
