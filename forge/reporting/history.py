"""History of a run: its launches, and where the wall time went."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from forge.core import events
from forge.core.events import Event
from forge.core.paths import RunPaths
from forge.run.launches import LaunchHistory, launches_of
from forge.trainer import metrics
from forge.trainer.metrics import Line

# Phase -> what its time was spent on, in the order people ask.
PHASES = {
    "train": "steps that are part of the result",
    "eval": "validation loss",
    "save": "stalls while a checkpoint is written",
    "init": "launch to first step: imports, rendezvous, model, compile",
    "stage": "shards or inputs to node-local storage",
    "preflight": "checks of nodes, fabric and ranks",
    "validate": "independent check of the final checkpoint",
    "recomputed": "steps that a restart retrained, or that were never saved",
    "waiting": "queue, start of processes, down time between launches",
}

_AROUND = (events.Stage, events.Preflight, events.Validate)


class Phase(NamedTuple):
    """A stretch of wall time; start and end in seconds since the epoch."""

    name: str
    start: float
    end: float


@dataclass
class History:
    """Launches of a run, and where all its wall time went. phases: in order, without overlap."""

    launches: list[LaunchHistory]
    phases: list[Phase]

    @property
    def seconds(self) -> dict[str, float]:
        """Wall seconds per phase, in the order of PHASES; only phases that took time."""
        total: dict[str, float] = defaultdict(float)
        for phase in self.phases:
            total[phase.name] += phase.end - phase.start
        return {name: total[name] for name in PHASES if name in total}

    @property
    def wall_sec(self) -> float:
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float | None:
        """Share of the wall time in training steps that survived, in [0, 1]; None without any."""
        return self.seconds.get("train", 0.0) / self.wall_sec if self.wall_sec else None


def read_history(paths: RunPaths) -> History:
    """The run's history; empty lists where a file is missing. Raises DataError where another version of
    Forge wrote the log."""
    return history_of(events.read(paths.events), metrics.read(paths.metrics))


def history_of(log: list[Event], lines: Sequence[Line]) -> History:
    """The history that these files of a run tell."""
    launches = launches_of(log, lines)
    return History(launches, _phases(log, launches))


def kept_steps(launches: list[LaunchHistory]) -> dict[str, float]:
    """Launch id -> the last of its steps that a later launch built on (inf: nothing undone)."""
    kept, floor = {}, inf
    for launch in reversed(launches):
        kept[launch.id] = floor
        if launch.resumed_step is not None:
            floor = min(floor, launch.resumed_step)
    return kept


# --- wall time ----------------------------------------------------------------------------------


def _phases(log: list[Event], launches: list[LaunchHistory]) -> list[Phase]:
    kept = kept_steps(launches)
    pieces = [_span(event) for event in log if isinstance(event, _AROUND)]
    for launch in launches:
        pieces += _undone(_inside(launch), _recomputed_from(launch, kept[launch.id]))
    return _joined(sorted(pieces, key=lambda piece: piece.start))


def _span(event: events.Timed) -> Phase:
    """Phase that this event took; of a save only the stall, since the rest is written while training
    continues."""
    start = event.time - event.seconds
    stall = event.stall if isinstance(event, events.Save) else event.seconds
    return Phase(type(event).__name__.lower(), start, start + stall)


def _inside(launch: LaunchHistory) -> list[Phase]:
    """The phases of a launch from its start to its end; what has no other name is training."""
    if launch.ready is None:
        return [Phase("init", launch.start, launch.end)]
    pieces, cursor = [Phase("init", launch.start, launch.ready)], launch.ready
    stalls = [_span(event) for event in launch.log if isinstance(event, events.Eval | events.Save)]
    for stall in stalls:
        start = max(stall.start, cursor)
        if stall.end > start:
            pieces += [Phase("train", cursor, start), Phase(stall.name, start, stall.end)]
            cursor = stall.end
    return [*pieces, Phase("train", cursor, launch.end)]


def _recomputed_from(launch: LaunchHistory, kept_step: float) -> float:
    """Time at which the launch passed the last step that anything was built on; inf when all was of use.

    The last line up to that step tells it: its save, or a metrics line shortly before.
    """
    if launch.ready is None:
        return inf
    if launch.ending and launch.ending.is_failure:
        saved = [save.step for save in launch.saves]
        kept_step = min(kept_step, max(saved, default=launch.resumed_step or 0))
    if launch.last_step <= kept_step:
        return inf
    before = [when for step, when in launch.passed if step <= kept_step]
    return max(before, default=launch.ready)


def _undone(pieces: Iterable[Phase], recomputed_from: float) -> list[Phase]:
    """The pieces with everything from `recomputed_from` on called recomputed."""
    result: list[Phase] = []
    for piece in pieces:
        cut = min(max(recomputed_from, piece.start), piece.end)
        result += [Phase(piece.name, piece.start, cut), Phase("recomputed", cut, piece.end)]
    return [piece for piece in result if piece.end > piece.start]


def _joined(pieces: Iterable[Phase]) -> list[Phase]:
    """Ordered pieces without overlap, gaps filled with waiting, equal neighbours merged.

    A gap after validation does not count as waiting: the run was complete until its goal was raised.
    """
    joined: list[Phase] = []
    for piece in pieces:
        cursor = joined[-1].end if joined else piece.start
        start = max(piece.start, cursor)
        if piece.end <= start:
            continue  # clocks of two nodes differ, or a save beside the steps
        if start > cursor and joined[-1].name != "validate":
            joined.append(Phase("waiting", cursor, start))
        if joined and joined[-1].name == piece.name and joined[-1].end == start:
            joined[-1] = joined[-1]._replace(end=piece.end)
        else:
            joined.append(Phase(piece.name, start, piece.end))
    return joined
