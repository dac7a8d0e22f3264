"""The model of ETTR (forge/core/goodput.py), fitted on some storms and tested on another."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from bench.storm.raw import Raw
from bench.storm.score import gaps, landed, wall
from forge.core.goodput import ettr


@dataclass(frozen=True)
class Fit:
    """The numbers of one contender, in seconds; saved_share in [0, 1]."""

    interval: float
    stall: float
    restart: float
    detection: float
    saved_share: float

    def ettr(self, between_events: float) -> float:
        return ettr(between_events=between_events, **asdict(self))


def fit(raws: Sequence[Raw], *, without_queue: bool = False) -> Fit | None:
    """Of these storms; None without an event after which the run went on.

    An event is saved where no step was retrained. R is the mean time without a useful step of saved
    events, without the steps retrained of the others where none is; D what the others lack more
    than half an interval. without_queue: the time in Slurm's queue is no part of either.
    """
    found = [(gap, raw.step_sec) for raw in raws for gap in gaps(raw) if gap.is_over]
    if not found:
        return None
    interval = raws[0].save_every_sec
    lost = [
        (gap.seconds - (gap.queued if without_queue else 0.0), gap.steps_again * sec)
        for gap, sec in found
    ]
    saved = [seconds for seconds, again in lost if not again]
    unsaved = [(seconds, again) for seconds, again in lost if again]
    if saved:
        restart = statistics.mean(saved)
    else:
        restart = statistics.mean(seconds - again for seconds, again in unsaved)
    detection = 0.0
    if unsaved and saved:
        mean = statistics.mean(seconds for seconds, _ in unsaved)
        detection = max(0.0, mean - restart - interval / 2)
    return Fit(interval, _stall(raws), restart, detection, len(saved) / len(found))


def _stall(raws: Sequence[Raw]) -> float:
    """Mean seconds by which a step after a save comes late."""
    late = []
    for raw in raws:
        every = max(1, round(raw.save_every_sec / raw.step_sec))
        for launch in raw.launches:
            for number, (before, after) in enumerate(pairwise(launch.times), launch.start + 1):
                if number % every == 0:
                    late.append(max(0.0, after - before - raw.step_sec))
    return statistics.mean(late) if late else 0.0


def between_events(raw: Raw) -> float:
    """The mean distance of the events that landed, in seconds."""
    return wall(raw) / max(1, len(landed(raw)))
