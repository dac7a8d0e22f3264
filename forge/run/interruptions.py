"""Rate and cost of the interruptions of runs here, from event logs and Slurm's accounting."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from forge.core import events
from forge.core.config import Config
from forge.core.errors import ForgeError
from forge.core.events import Event
from forge.core.goodput import Interruptions
from forge.core.paths import RunPaths
from forge.core.process import hostname
from forge.slurm import slurm
from forge.slurm.slurm import AccountedStart

SINCE_SEC = 30 * 24 * 3600.0  # older events say little about a site
MOST_LOGS = 20  # of other runs, the newest ones: reading them delays a launch
RECENT_SAVES = 3

_ENDINGS = (events.End, events.Preempted)
_DURING = (events.Init, events.Eval, events.Save, events.Skipped, events.Budget, events.Forecast)
# States of a start that the site has ended. Not TIMEOUT: the user has chosen the limit.
INTERRUPTED = ("PREEMPTED", "NODE_FAIL", "REQUEUED", "BOOT_FAIL")


@dataclass
class _Launch:
    """A launch in an event log. end: of the last event that is known of it; ready: its first step."""

    start: events.Launch
    end: float
    ready: float | None = None
    ending: Event | None = None  # None: cut off, or still running
    is_final: bool = False  # no restart has helped: only a person starts it again


def known_at_launch(config: Config, paths: RunPaths, job: slurm.Job | None) -> Interruptions:
    """Facts by which ranks choose the interval between checkpoints; nothing where the config has chosen
    it."""
    if config.train.checkpoint_minutes != "auto":
        return Interruptions()
    return known_here(paths, partition=job.partition if job else None)


def known_here(paths: RunPaths, *, partition: str | None = None) -> Interruptions:
    """Interruptions of the last 30 days, from the event logs of this run and of others in its `results`,
    and from Slurm's accounting of this user's jobs in a partition ("": in all). None: on this machine,
    and no Slurm is asked. Launches elsewhere do not count: a laptop says nothing of a cluster."""
    since = time.time() - SINCE_SEC
    starts = [] if partition is None else slurm.accounted_starts(since, partition)
    jobs = {start.job for start in starts} if partition else set()
    here = hostname()

    def is_here(launch: events.Launch) -> bool:
        if partition is None or launch.job is None:
            return partition is None and launch.job is None and launch.host == here
        return not jobs or launch.job in jobs  # without accounting no job's partition is known

    logs = [_read(one) for one in (paths, *_others(paths))]
    recent = [[event for event in log if since <= event.time] for log in logs]
    return interruptions([list(_of_launches(log, is_here)) for log in recent], starts)


def _of_launches(log: Iterable[Event], counts: Callable[[events.Launch], bool]) -> Iterator[Event]:
    """The events of these launches, each up to the next launch."""
    is_counted = False
    for event in log:
        if isinstance(event, events.Launch):
            is_counted = counts(event)
        if is_counted:
            yield event


def interruptions(
    logs: Sequence[Sequence[Event]], starts: Iterable[AccountedStart] = ()
) -> Interruptions:
    """Interruptions by event logs and accounting. logs: of the run itself first, each oldest first.
    starts: of jobs; those that a log knows count once."""
    launches = [_launches(log) for log in logs]
    all_launches = [launch for of_log in launches for launch in of_log]
    jobs = {launch.start.job for launch in all_launches}
    others = [start for start in starts if start.job not in jobs]
    in_time = [saved for of_log in launches for saved in _interrupted(of_log)]
    down = [seconds for of_log in launches for seconds in _down_times(of_log)]
    first = [one.ready - one.start.time for one in all_launches if one.ready is not None]
    recent = _saves(logs[0])[-RECENT_SAVES:] if logs else []
    return Interruptions(
        number=len(in_time) + sum(start.state in INTERRUPTED for start in others),
        seconds=sum(max(0.0, launch.end - launch.start.time) for launch in all_launches)
        + sum(start.seconds for start in others),
        saved=sum(in_time),
        not_saved=len(in_time) - sum(in_time),
        restart=_median(down) or _median(first),
        stall=_median([save.stall for save in recent]),
        save=_median([save.seconds for save in recent]),
    )


def _others(paths: RunPaths) -> list[RunPaths]:
    """The other runs beside this one whose logs are the newest. Links are left out."""
    logs = [
        log
        for log in paths.root.parent.glob(f"*/{paths.events.name}")
        if log.parent.name != paths.root.name
        and not log.is_symlink()
        and not log.parent.is_symlink()
    ]
    with suppress(OSError):  # removed meanwhile
        logs.sort(key=lambda log: log.stat().st_mtime, reverse=True)
    return [RunPaths(log.parent) for log in logs[:MOST_LOGS]]


def _read(paths: RunPaths) -> list[Event]:
    """The events of a run; none where another version of Forge wrote them."""
    with suppress(ForgeError):
        latest = time.time()  # later ones, and NaN, were not written by Forge
        return [event for event in events.read(paths.events) if event.time <= latest]
    return []


def _saves(log: Iterable[Event]) -> list[events.Save]:
    """Saves whose times were not edited into what no time can be."""
    return [
        event
        for event in log
        if isinstance(event, events.Save)
        and 0 <= event.stall < math.inf
        and 0 <= event.seconds < math.inf
    ]


def _launches(log: Iterable[Event]) -> list[_Launch]:
    launches: list[_Launch] = []
    for event in log:
        if isinstance(event, events.Launch):
            launches.append(_Launch(event, event.time))
        elif launches and launches[-1].ending:
            launches[-1].is_final |= isinstance(event, events.End) and event.is_final
        elif launches:
            launch = launches[-1]
            if isinstance(event, events.Init) and launch.ready is None:
                launch.ready = event.time
            if isinstance(event, _ENDINGS):
                launch.ending = event
            if isinstance(event, (*_DURING, *_ENDINGS)):
                launch.end = event.time
    return launches


def _interrupted(launches: Sequence[_Launch]) -> list[bool]:
    """For each launch that was interrupted, whether a checkpoint was saved in time. Neither a person's
    stop counts, nor a failure of training, nor a last launch without an end: it may still run."""
    return [
        saved
        for number, launch in enumerate(launches, 1)
        if (saved := _saved_in_time(launch, is_last=number == len(launches))) is not None
    ]


def _saved_in_time(launch: _Launch, *, is_last: bool) -> bool | None:
    ending = launch.ending
    if ending is None:
        return None if is_last else False
    if isinstance(ending, events.End):
        if ending.is_final or ending.by_person:
            return None
        return ending.saved_step is not None
    return True  # Slurm gives time before it preempts a job


def _down_times(launches: Sequence[_Launch]) -> list[float]:
    """Seconds from the end of each launch to the first step of the next, where nobody had to rerun a
    command."""
    return [
        max(0.0, after.ready - before.end)
        for before, after in pairwise(launches)
        if after.ready is not None
        and not before.is_final
        and (
            isinstance(before.ending, events.Preempted)
            or (isinstance(before.ending, events.End) and before.ending.starts_again)
            or (after.start.job is not None and after.start.job == before.start.job)
        )
    ]


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None
