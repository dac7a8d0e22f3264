"""From raw files to figures: useful steps, ETTR, time to the next useful step, wrong outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from bench.storm.raw import Allocation, Raw, Strike

DRAWS = 10_000  # of the bootstrap
OUTAGE_SEC = 5.0  # a longer time without a useful step is no save on a busy machine
CHECKPOINTS_BEFORE_ZERO = 2  # a start from zero is wrong when so many should have been there


@dataclass(frozen=True)
class Cycle:
    """The time between two events, seconds: all of it, in useful steps, and in Slurm's queue."""

    wall: float
    useful: float
    queued: float


@dataclass(frozen=True)
class Gap:
    """The time without a useful step after an event. queued: of it, in Slurm's queue. steps_again: that
    were trained twice. is_over: False where the storm ended first, so that it is a lower bound."""

    kind: str
    seconds: float
    queued: float
    steps_again: int
    is_over: bool = True


@dataclass(frozen=True)
class Wrong:
    """Outcomes that nobody wants, counted. from_zero: launches that began anew although there were
    checkpoints; wrong_steps: launches whose samples were not those of an undisturbed run; corrupt:
    launches that resumed from a corrupt checkpoint; hands: a person had to submit again."""

    from_zero: int = 0
    wrong_steps: int = 0
    corrupt: int = 0
    hands: int = 0

    def __add__(self, other: Wrong) -> Wrong:
        return Wrong(
            self.from_zero + other.from_zero,
            self.wrong_steps + other.wrong_steps,
            self.corrupt + other.corrupt,
            self.hands + other.hands,
        )


def useful_steps(raw: Raw) -> list[tuple[float, float]]:
    """(time, steps) of all useful work, in order of time: each step once, by its first time, where its
    chain is that of the undisturbed run; of a contender that loses samples, distinct samples in steps."""
    if raw.samples:
        return [(at, new / raw.samples_per_step) for at, new in raw.samples if 0 < at <= wall(raw)]
    done = sorted(
        (at, step)
        for launch in raw.launches
        if not launch.corrupt
        for step, at in enumerate(launch.times, launch.start + 1)
        if launch.wrong_from is None or step < launch.wrong_from
    )
    seen: set[int] = set()
    found = []
    for at, step in done:
        if step not in seen and at <= wall(raw):
            seen.add(step)
            if at > 0:  # those before belong to the start, not to the storm
                found.append((at, 1.0))
    return found


def wall(raw: Raw) -> float:
    return 60 * raw.minutes


def queue_times(raw: Raw) -> list[tuple[float, float]]:
    """When the job waited for Slurm, from its submission or requeue to its start; without overlaps."""
    waits = sorted((max(0.0, one.submit), _start(raw, one)) for one in raw.allocations)
    found: list[tuple[float, float]] = []
    for submitted, end in waits:
        begin = max(submitted, found[-1][1]) if found else submitted
        if begin < end:
            found.append((begin, end))
    return found


def _start(raw: Raw, one: Allocation) -> float:
    """When an allocation began, by the end of the storm at the latest. sacct (22.05) has a later time as
    the start of a job with --no-kill that lost a node and kept the others: where the job has trained
    before that time, the moment counts from which on it could start."""
    start = wall(raw) if one.start is None else min(wall(raw), one.start)
    has_trained = any(one.submit < launch.begin < start for launch in raw.launches)
    return start if one.eligible is None or not has_trained else min(start, one.eligible)


def landed(raw: Raw) -> list[Strike]:
    return [strike for strike in raw.strikes if strike.landed is not None]


def cycles(raw: Raw) -> list[Cycle]:
    """The storm, cut at each event that landed."""
    marks = [0.0, *(strike.at for strike in landed(raw)), wall(raw)]
    steps, queued = useful_steps(raw), queue_times(raw)
    return [
        Cycle(
            wall=end - begin,
            useful=raw.step_sec * sum(n for at, n in steps if begin < at <= end),
            queued=overlap(queued, begin, end),
        )
        for begin, end in pairwise(marks)
    ]


def ettr(parts: Sequence[Cycle], *, without_queue: bool = False) -> float:
    """Effective training time ratio: useful time over wall time, in [0, 1] but for the pacing's error.
    without_queue: of the time in which the job did not wait for Slurm."""
    time = sum(part.wall - (part.queued if without_queue else 0.0) for part in parts)
    return sum(part.useful for part in parts) / time if time > 0 else 0.0


def interval(parts: Sequence[Cycle], *, without_queue: bool = False) -> tuple[float, float]:
    """95 % of ettr(), by bootstrap over the times between events. The same parts give the same."""
    if not parts:
        return 0.0, 0.0
    useful = np.array([part.useful for part in parts])
    time = np.array([part.wall - (part.queued if without_queue else 0.0) for part in parts])
    chosen = np.random.default_rng(0).integers(len(parts), size=(DRAWS, len(parts)))
    ratios = useful[chosen].sum(axis=1) / np.maximum(time[chosen].sum(axis=1), 1e-9)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(low), float(high)


def paired(ours: Sequence[Raw], theirs: Sequence[Raw]) -> tuple[float, float, float] | None:
    """Mean difference of ettr() in the same storms, and its 95 % by Student's t over the seeds; None with
    fewer than two seeds that both have."""
    from scipy.stats import t  # here: `make storm` runs without the packages of tests

    of_other = {one.seed: one for one in theirs}
    apart = [
        ettr(cycles(one)) - ettr(cycles(of_other[one.seed])) for one in ours if one.seed in of_other
    ]
    if len(apart) < 2:
        return None
    half = t.ppf(0.975, len(apart) - 1) * np.std(apart, ddof=1) / np.sqrt(len(apart))
    middle = float(np.mean(apart))
    return middle, middle - float(half), middle + float(half)


def per_node_hour(raws: Sequence[Raw]) -> float:
    """Useful time of all nodes that train over the time of all nodes that were allocated."""
    useful = sum(n * raw.step_sec * raw.num_nodes for raw in raws for _, n in useful_steps(raw))
    allocated = 0.0
    for raw in raws:
        for one in raw.allocations:
            if one.start is not None:
                end = wall(raw) if one.end is None else min(one.end, wall(raw))
                allocated += one.nodes * max(0.0, end - max(0.0, _start(raw, one)))
    return useful / allocated if allocated else 0.0


def gaps(raw: Raw) -> list[Gap]:
    """For each event that landed, the longest time between two useful steps that began before the next
    event. An event that landed while the run did not train, and that stopped it no second time, has none:
    that time counts for the event before."""
    times = [at for at, _ in useful_steps(raw)]
    spans = list(zip([0.0, *times], [*times, wall(raw)], strict=True))
    strikes, queued = landed(raw), queue_times(raw)
    found: list[Gap] = []
    taken = (0.0, 0.0)  # the span of the event before
    for number, strike in enumerate(strikes):
        until = strikes[number + 1].at if number + 1 < len(strikes) else wall(raw)
        own = [span for span in spans if span[1] > strike.at and span[0] < until]
        others = [span for span in own if span != taken]
        begin, end = max(others, key=lambda span: span[1] - span[0], default=(0.0, 0.0))
        if len(others) == len(own) or end - begin > OUTAGE_SEC:
            taken = begin, end
            waited = overlap(queued, begin, end)
            again = _again(raw, begin, end)
            found.append(Gap(strike.kind, end - begin, waited, again, end < wall(raw)))
    return found


def overlap(spans: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """How much of the time from begin to end the spans cover, which do not overlap one another."""
    return sum(max(0.0, min(end, b) - max(begin, a)) for a, b in spans)


def _again(raw: Raw, begin: float, end: float) -> int:
    """Steps that were completed between two useful ones: they had been trained before."""
    return sum(begin < at < end for launch in raw.launches for at in launch.times)


def wrong(raw: Raw) -> Wrong:
    """Wrong outcomes of a storm."""
    should_be_there = CHECKPOINTS_BEFORE_ZERO * raw.save_every_sec / raw.step_sec
    best, from_zero = 0, 0
    for launch in sorted(raw.launches, key=lambda launch: launch.begin):
        from_zero += launch.start == 0 and best >= should_be_there
        best = max(best, launch.start + len(launch.times))
    return Wrong(
        from_zero=from_zero,
        wrong_steps=sum(launch.wrong_from is not None for launch in raw.launches),
        corrupt=sum(launch.corrupt for launch in raw.launches),
        hands=len(raw.hands),
    )
