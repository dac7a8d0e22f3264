"""History of a run: its launches, the curves without recomputed steps, and where the wall time went.

Read from metrics.jsonl and events.jsonl. Both are append-only and outlive every restart, so a step
may appear twice: in work that was lost, and in the work that repeated it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from forge.core.event_log import read_lines
from forge.core.paths import RunPaths

if TYPE_CHECKING:  # `forge show` asks for launches only and must start in a blink
    import pandas as pd

# Phase -> what its time was spent on, in the order people ask.
PHASES = {
    "train": "steps that are part of the result",
    "eval": "held-out loss",
    "save": "stalls while a checkpoint is written",
    "init": "launch to first step: imports, rendezvous, model, compile",
    "stage": "token shards to node-local storage",
    "preflight": "checks of nodes, fabric and ranks",
    "validate": "independent check of the final checkpoint",
    "lost": "steps done again after a restart, or never saved",
    "waiting": "queue, start of processes, down time between launches",
}
TRAIN_COLUMNS = ["loss", "grad_norm", "lr", "tokens_per_sec", "mfu", "tokens"]
EVAL_COLUMNS = ["loss"]

_ENDINGS = {"stop", "lost", "failed", "completed"}  # lost: a rank, and with it the launch
_IN_LAUNCH = {"launch", "init", "eval", "save"} | _ENDINGS
_AROUND = {"stage", "preflight", "validate"}

Line = dict[str, Any]


class Phase(NamedTuple):
    """A stretch of wall time; start and end in seconds since the epoch."""

    name: str
    start: float
    end: float


class Restart(NamedTuple):
    """A launch that went on from a checkpoint: at which step, when, and how the last one ended."""

    step: int
    time: float
    cause: str


@dataclass
class Launch:
    """One start of the ranks, from the first line that carries its id to its recorded end."""

    id: str
    start: float
    lines: list[Line] = field(default_factory=list)  # events and metrics, in order of time
    is_last: bool = False

    def first(self, *events: str) -> Line | None:
        """Its first event of one of these kinds."""
        return next((line for line in self.lines if line.get("event") in events), None)

    @cached_property
    def ending(self) -> Line | None:
        """The event that ended it; None when it was cut off, or still runs."""
        return self.first(*_ENDINGS)

    @cached_property
    def end(self) -> float:
        return (self.ending or self.lines[-1])["time"]

    @cached_property
    def ready(self) -> float | None:
        """When its ranks were ready to train; None if they never were."""
        if init := self.first("init"):
            return init["time"]
        return next((line["time"] for line in self.lines if "kind" in line), None)

    @cached_property
    def resumed_step(self) -> int | None:
        """The step it went on from (0: a fresh start); None if it never got there."""
        init = self.first("init")
        if init and "step" in init:
            return init["step"]
        # Without the event: its first line tells that everything from there on was done again.
        first = next((line["step"] for line in self.lines if line.get("kind") == "train"), None)
        return None if first is None else max(first - 1, 0)

    @cached_property
    def last_step(self) -> int:
        return max((line["step"] for line in self.lines if "step" in line), default=0)

    @property
    def has_completed(self) -> bool:
        return self.ending is not None and self.ending["event"] == "completed"

    @property
    def has_failed(self) -> bool:
        """Whether it ended without the save that a stop or a completion makes."""
        return self.ending is not None and self.ending["event"] in ("lost", "failed")

    @property
    def outcome(self) -> str:
        """How it ended, in words."""
        if self.ending is None:
            return "no end recorded: it still runs or was killed" if self.is_last else "cut off"
        if self.has_completed:
            return "completed"
        if self.ending["event"] == "stop":
            return f"stopped: {self.ending.get('cause', 'cause unknown')}"
        rank, message = self.ending.get("rank"), self.ending.get("message", "no message")
        if self.ending["event"] == "lost":
            return f"lost a rank: {message}"
        return f"failed{'' if rank is None else f' on rank {rank}'}: {message}"


@dataclass
class History:
    """A run's surviving curves (frames indexed 0.., sorted by step) and all of its wall time.

    train: step, loss, grad_norm, lr, tokens_per_sec, mfu, tokens, time, launch.
    evals: step, loss, time, launch. phases: in order, without overlap.
    """

    train: pd.DataFrame
    evals: pd.DataFrame
    launches: list[Launch]
    restarts: list[Restart]
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


def read_launches(paths: RunPaths) -> list[Launch]:
    """Every launch of the run, oldest first, each with its own events and metrics."""
    return _launches(_timed(paths.events, "event"), _timed(paths.metrics, "kind"))


def read_history(paths: RunPaths) -> History:
    """The run's history; empty frames and lists where a file is missing."""
    events, metrics = _timed(paths.events, "event"), _timed(paths.metrics, "kind")
    launches = _launches(events, metrics)
    kept = _kept_steps(launches)
    return History(
        train=_frame(metrics, "train", TRAIN_COLUMNS, kept),
        evals=_frame(metrics, "eval", EVAL_COLUMNS, kept),
        launches=launches,
        restarts=_restarts(launches),
        phases=_phases(events, launches, kept),
    )


# --- launches -----------------------------------------------------------------------------------


def _timed(path: Path, key: str) -> list[Line]:
    """The lines that have a time and `key`; others are from a version we do not know."""
    return [
        line
        for line in read_lines(path)
        if key in line and isinstance(line.get("time"), int | float)
    ]


def _launches(events: list[Line], metrics: list[Line]) -> list[Launch]:
    steps = [line for line in metrics if isinstance(line.get("step"), int)]
    own = [line for line in events if line["event"] in _IN_LAUNCH] + steps
    own.sort(key=lambda line: line["time"])  # stable: equal times keep the order of the file
    launches: dict[str, Launch] = {}
    current: Launch | None = None
    for line in own:
        name = line.get("launch")
        if name is not None:
            current = launches.setdefault(str(name), Launch(str(name), line["time"]))
        if current is not None:
            current.lines.append(line)
    for launch in list(launches.values())[-1:]:
        launch.is_last = True
    return list(launches.values())


def _kept_steps(launches: list[Launch]) -> dict[str, float]:
    """Launch id -> the last of its steps that a later launch built on (inf: nothing undone)."""
    kept, floor = {}, inf
    for launch in reversed(launches):
        kept[launch.id] = floor
        if launch.resumed_step is not None:
            floor = min(floor, launch.resumed_step)
    return kept


def _restarts(launches: list[Launch]) -> list[Restart]:
    return [
        Restart(launch.resumed_step, launch.start, before.outcome)
        for before, launch in pairwise(launches)
        if launch.resumed_step is not None
    ]


def _frame(
    metrics: list[Line], kind: str, columns: list[str], kept: dict[str, float]
) -> pd.DataFrame:
    """The lines of one kind on the surviving line of history, one per step."""
    import pandas as pd

    rows = [
        line
        for line in metrics
        if line["kind"] == kind
        and isinstance(line.get("step"), int)
        and line["step"] <= kept.get(str(line.get("launch")), inf)
    ]
    frame = pd.DataFrame(rows, columns=["step", *columns, "time", "launch"])
    types = {"step": "int64", "time": "float64"} | dict.fromkeys(columns, "float64")
    frame = frame.astype(types).drop_duplicates("step", keep="last")  # the later line wins
    return frame.sort_values("step", ignore_index=True)


# --- wall time ----------------------------------------------------------------------------------


def _phases(events: list[Line], launches: list[Launch], kept: dict[str, float]) -> list[Phase]:
    pieces = [_span(event) for event in events if event["event"] in _AROUND]
    for launch in launches:
        pieces += _undone(_inside(launch), _lost_from(launch, kept[launch.id]))
    return _joined(sorted(pieces, key=lambda piece: piece.start))


def _span(event: Line) -> Phase:
    """When training stood still for it: a save is written beside training after its `stall`."""
    seconds = event.get("seconds") or 0.0
    start = event["time"] - seconds
    return Phase(event["event"], start, start + event.get("stall", seconds))


def _inside(launch: Launch) -> list[Phase]:
    """The phases of a launch from its start to its end; what has no other name is training."""
    if launch.ready is None:
        return [Phase("init", launch.start, launch.end)]
    pieces, cursor = [Phase("init", launch.start, launch.ready)], launch.ready
    stalls = [_span(line) for line in launch.lines if line.get("event") in ("eval", "save")]
    for stall in stalls:
        start = max(stall.start, cursor)
        if stall.end > start:
            pieces += [Phase("train", cursor, start), Phase(stall.name, start, stall.end)]
            cursor = stall.end
    return [*pieces, Phase("train", cursor, launch.end)]


def _lost_from(launch: Launch, kept_step: float) -> float:
    """When the launch passed the last step that anything was built on; inf when all was of use.

    The last line up to that step tells it: its save, or a metrics line shortly before.
    """
    if launch.ready is None:
        return inf
    saved = [line for line in launch.lines if line.get("event") == "save"]
    if launch.has_failed:
        last_saved = max((line.get("step", 0) for line in saved), default=launch.resumed_step or 0)
        kept_step = min(kept_step, last_saved)
    if launch.last_step <= kept_step:
        return inf
    before = [_passed(line) for line in launch.lines if line.get("step", inf) <= kept_step]
    return max(before, default=launch.ready)


def _passed(line: Line) -> float:
    """When training went on beyond a line. A save is told when it is committed, steps later."""
    return _span(line).end if line.get("event") == "save" else float(line["time"])


def _undone(pieces: Iterable[Phase], lost_from: float) -> list[Phase]:
    """The pieces with everything from `lost_from` on called lost."""
    result: list[Phase] = []
    for piece in pieces:
        cut = min(max(lost_from, piece.start), piece.end)
        result += [Phase(piece.name, piece.start, cut), Phase("lost", cut, piece.end)]
    return [piece for piece in result if piece.end > piece.start]


def _joined(pieces: Iterable[Phase]) -> list[Phase]:
    """Ordered pieces without overlap, gaps filled with waiting, equal neighbours merged.

    A gap after validation is no waiting: the run was over until somebody wanted more of it.
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
