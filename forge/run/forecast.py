"""Forecast of the goodput and the end of a run, by the model of core/goodput."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from statistics import median

from forge.core import events
from forge.core.events import Event, Forecast
from forge.core.goodput import STALL_SEC, Interruptions, SaveTimes
from forge.core.terminal import duration
from forge.core.train_settings import Train
from forge.run.interruptions import interruptions
from forge.run.launches import LaunchHistory, launches_of


def expected_by(log: Sequence[Event]) -> Forecast | None:
    """Forecast of the run itself, the last one; else by its event log, for a run that saves by steps
    or minutes. None before the second save of a launch."""
    if isinstance(told := events.last(log, Forecast), Forecast):
        return told if told.interval else None
    launches = launches_of(log)
    cost, gaps = SaveTimes(log).cost, list(_gaps(launches))
    if cost is None or not gaps:
        return None
    return _expected(interruptions([launches]), median(gaps), cost[0])


def expected_of(
    train: Train, step_sec: float | None, known: Interruptions, saves: SaveTimes
) -> Forecast | None:
    """Before the run. step_sec: of a step; None where it is not known. None where its saves are due by
    steps only, of unknown time."""
    stall, save = saves.cost or (STALL_SEC, STALL_SEC)
    intervals = [train.checkpoint_every * step_sec] if step_sec is not None else []
    if train.checkpoint_minutes == "auto":
        intervals.append(known.interval(stall, save))
    elif train.checkpoint_minutes is not None:
        intervals.append(60.0 * train.checkpoint_minutes)
    return _expected(known, min(intervals), stall) if intervals else None


def end_at(now: float, seconds: float) -> str:
    """For people: the date so many seconds after `now` (since the epoch), and how long that is."""
    try:
        date = datetime.fromtimestamp(now + seconds, UTC)
    except (OverflowError, ValueError):
        return "after the last date of the calendar"
    return f"{date:%Y-%m-%d %H:%M} UTC, in {duration(seconds)}"


def _expected(known: Interruptions, interval: float, stall: float) -> Forecast | None:
    if interval <= 0:
        return None
    ettr = known.ettr(interval, stall)
    return Forecast(step=0, interval=interval, stall=stall, ettr=ettr, basis=str(known))


def _gaps(launches: Iterable[LaunchHistory]) -> Iterator[float]:
    """Seconds of training between two saves of a launch, but not before that of its end, which comes at
    any time."""
    for launch in launches:
        final = launch.ending.saved_step if launch.ending else None
        saves = [save for save in launch.saves if save.step != final]
        ends = ((one.time, other.time - other.stall) for one, other in pairwise(saves))
        yield from (end - start for start, end in ends if end > start)
