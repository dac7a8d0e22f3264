"""Rate and cost of the interruptions of runs here, from event logs and Slurm's accounting."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from statistics import median

from forge.core import events
from forge.core.config import Config
from forge.core.errors import ForgeError
from forge.core.events import Event
from forge.core.goodput import Interruptions
from forge.core.paths import RunPaths
from forge.core.process import hostname
from forge.run.launches import LaunchHistory, launches_of
from forge.slurm import slurm
from forge.slurm.slurm import AccountedStart

SINCE_SEC = 30 * 24 * 3600.0  # older events say little about a site
MOST_LOGS = 20  # of other runs, the newest ones: reading them delays a launch

# States of a start that the site has ended. Not TIMEOUT: the user has chosen the limit.
INTERRUPTED = ("PREEMPTED", "NODE_FAIL", "REQUEUED", "BOOT_FAIL")


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

    def counts(launch: LaunchHistory) -> bool:
        begun = launch.begun
        if begun is None or begun.time < since:
            return False
        if partition is None or begun.job is None:
            return partition is None and begun.job is None and begun.host == here
        return not jobs or begun.job in jobs  # without accounting no job's partition is known

    runs = [launches_of(readable_events(one)) for one in (paths, *_others(paths))]
    return interruptions([list(filter(counts, launches)) for launches in runs], starts)


def interruptions(
    runs: Sequence[Sequence[LaunchHistory]], starts: Iterable[AccountedStart] = ()
) -> Interruptions:
    """Interruptions by event logs and accounting. runs: launches of each. starts: of jobs; those
    that a log knows count once."""
    launches = [launch for run in runs for launch in run]
    jobs = {_job(launch) for launch in launches}
    others = [start for start in starts if start.job not in jobs]
    in_time = [saved for one in launches if (saved := _saved_in_time(one)) is not None]
    down = [seconds for run in runs for seconds in _down_times(run)]
    first = [launch.ready - launch.start for launch in launches if launch.ready is not None]
    return Interruptions(
        number=len(in_time) + sum(start.state in INTERRUPTED for start in others),
        seconds=sum(max(0.0, launch.end - launch.start) for launch in launches)
        + sum(start.seconds for start in others),
        saved=sum(in_time),
        not_saved=len(in_time) - sum(in_time),
        restart=median(down or first) if down or first else None,
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


def readable_events(paths: RunPaths) -> list[Event]:
    """The events of a run; none where another version of Forge wrote them."""
    with suppress(ForgeError):
        latest = time.time()  # later ones, and NaN, were not written by Forge
        return [event for event in events.read(paths.events) if event.time <= latest]
    return []


def _saved_in_time(launch: LaunchHistory) -> bool | None:
    """Return whether a checkpoint was saved before a launch was interrupted; None where it was not: for a
    person's stop, a failure of training, and a run's last launch without an end, which may still run."""
    ending = launch.ending
    if ending is None:  # Slurm gives time before it preempts a job
        return launch.first(events.Preempted) is not None or (None if launch.is_last else False)
    if ending.is_final or ending.by_person:
        return None
    # Ranks that were killed before their final save exited without a record.
    return ending.saved_step is not None and launch.first(events.RankError) is None


def _job(launch: LaunchHistory) -> str | None:
    return launch.begun.job if launch.begun else None


def _down_times(launches: Sequence[LaunchHistory]) -> list[float]:
    """Seconds from the end of each launch to the first step of the next, where nobody had to rerun a
    command."""
    return [
        max(0.0, after.ready - before.end)
        for before, after in pairwise(launches)
        if after.ready is not None
        and not before.is_final
        and (
            (before.ending is not None and before.ending.starts_again)
            or (_job(after) is not None and _job(after) == _job(before))
        )
    ]
