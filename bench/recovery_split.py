"""Where the time goes between an event and the next new step: one split for all kinds of events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from forge.core import events
from forge.core.events import Event
from forge.trainer.metrics import Line, TrainLine

# Phase -> what its time was spent on, in order of time. Each ends at the mark of the same name.
PHASES = {
    "detection": "until a rank records a failure, or begins the save of a stop",
    "end of ranks": "until the last process of the old launch is gone, their save included",
    "slurm": "until Slurm starts the job again",
    "batch step": "from there to the start of `forge stage`",
    "stage": "`forge stage`",
    "preflight": "`forge preflight`, and the start of its process",
    "launch": "the checks of nodes that lost a rank, and `forge train` up to srun or torchrun",
    "processes": "until every rank has imported what it needs to report itself",
    "load": "imports of torch, rendezvous, shards, checkpoint, compile",
    "first step": "the first step of the new launch; where training goes on, the longest step",
    "steps again": "steps that were trained before the event, but not saved",
}
# Of Slurm, and of the interval between two checkpoints: apart from what Forge needs.
NOT_OF_FORGE = ("slurm", "steps again")


@dataclass(frozen=True)
class Seen:
    """What no log says of an event, in seconds since the epoch; None where it was not seen."""

    fault: float  # when the event began
    record: float | None = None  # the first record of a failure in the old launch
    ended: float | None = None  # the last process of the old launch was gone
    job_start: float | None = None  # Slurm started the job again
    processes: dict[str, float] = field(
        default_factory=dict
    )  # launch -> its last rank has its pid file


@dataclass(frozen=True)
class Split:
    """Seconds by phase, which add up to `total`: from the event to the first step beyond all that were
    trained before. Phases that the event did not have are 0."""

    seconds: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def of_forge(self) -> float:
        return sum(sec for name, sec in self.seconds.items() if name not in NOT_OF_FORGE)


def split(seen: Seen, log: Sequence[Event], lines: Sequence[Line]) -> Split | None:
    """The split of an event that ends a launch; None while no new launch has taken a new step.

    log, lines: of the run, whole. Where ranks were launched in vain between the event and the new
    step, the launch that took it counts, and what came before belongs to the phase `launch`.
    """
    steps = [line for line in lines if isinstance(line, TrainLine)]
    launches = [
        event for event in log if isinstance(event, events.Launch) and event.time > seen.fault
    ]
    if not launches:
        return None
    again = launches[0].time  # until then, steps were those of the launch that the event hit
    before = max((step.step for step in steps if step.time <= again), default=0)
    new = next((step for step in steps if step.time > again and step.step > before), None)
    if new is None:
        return None
    marks = _marks(seen, log, steps, new)
    seconds, cursor = {}, seen.fault
    for phase in PHASES:
        # Clocks of Slurm have seconds only, and an event that was not seen takes no time.
        end = max(cursor, min(marks.get(phase) or cursor, new.time))
        seconds[phase], cursor = round(end - cursor, 3), end
    return Split(seconds)


def longest_step(since: float, until: float, lines: Sequence[Line]) -> Split:
    """The split of an event through which the ranks train on: the longest time between two steps, from
    `since` to `until` in seconds since the epoch. All of it is `first step`."""
    times = [line.time for line in lines if isinstance(line, TrainLine)]
    marks = [since, *(time for time in times if since < time < until), until]
    longest = max(end - begin for begin, end in pairwise(marks))
    return Split({phase: round(longest, 3) if phase == "first step" else 0.0 for phase in PHASES})


def _marks(
    seen: Seen, log: Sequence[Event], steps: Sequence[TrainLine], new: TrainLine
) -> dict[str, float | None]:
    """The end of each phase; None where it is not known."""
    after = [event for event in log if seen.fault < event.time <= new.time]
    launch = next(e for e in after if isinstance(e, events.Launch) and e.launch == new.launch)
    around = [event for event in after if event.time <= launch.time]
    stage, preflight = (events.last(around, kind) for kind in (events.Stage, events.Preflight))
    init = next((e for e in after if isinstance(e, events.Init) and e.launch == new.launch), None)
    first = next(step for step in steps if step.launch == new.launch)
    return {
        "detection": seen.record or _begin_of_save(around),
        "end of ranks": seen.ended,
        "slurm": seen.job_start,
        "batch step": stage.time - stage.seconds if isinstance(stage, events.Stage) else None,
        "stage": stage.time if stage else None,
        "preflight": preflight.time if preflight else None,
        "launch": launch.time,
        "processes": seen.processes.get(new.launch),
        "load": init.time if init else None,
        "first step": first.time,
        "steps again": new.time,
    }


def _begin_of_save(around: Sequence[Event]) -> float | None:
    """When the ranks of a stop began to save; None where they ended otherwise. It is the last save of the
    old launch: the signal of a time limit can come half a minute after the limit."""
    ends = (events.Requeue, events.Preempted, events.Stop)
    save = events.last(around, events.Save)
    if not isinstance(save, events.Save) or not any(isinstance(event, ends) for event in around):
        return None
    return save.time - save.seconds
