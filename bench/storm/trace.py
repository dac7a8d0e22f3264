"""The events of a storm: when, and of which kind. The same for every contender, drawn from a seed or read
from a site's own accounting."""

from __future__ import annotations

import math
import random
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bench import faults
from forge.core.errors import DataError


@dataclass(frozen=True)
class Kind:
    """A kind of event. share: of all events, an assumption. needs_ranks: hits a process, not a job.
    repaired_sec: after its strike, when what it broke is repaired; None: nothing is, or at once."""

    what: str
    share: float
    fault: faults.Fault
    needs_ranks: bool = False
    repaired_sec: float | None = None


# The shares are an assumption, of a partition whose jobs others preempt; every table prints them.
KINDS = {
    "preemption": Kind("preempted with a grace period", 0.55, faults.preempt),
    "time-limit": Kind("time limit", 0.20, faults.reach_time_limit),
    "killed-rank": Kind("SIGKILL of a rank", 0.10, faults.kill_rank, needs_ranks=True),
    "power-cut": Kind("a node loses its power", 0.07, faults.cut_power, repaired_sec=60),
    "hung-rank": Kind("SIGSTOP of a rank", 0.03, faults.hang_rank, needs_ranks=True),
    "cable": Kind("a node loses its network", 0.02, faults.cut_cable, repaired_sec=60),
    "slurmctld": Kind("slurmctld away for 30 s", 0.03, faults.stop_slurmctld, repaired_sec=0),
}
# How the jobs of `sacct -D` ended -> kind. Other ends are not events: completed, cancelled by a person.
OF_STATE = {
    **{"PREEMPTED": "preemption", "REQUEUED": "preemption", "TIMEOUT": "time-limit"},
    **{"FAILED": "killed-rank", "OUT_OF_MEMORY": "killed-rank", "NODE_FAIL": "power-cut"},
}
COLUMNS = ("Start", "End", "State")


class Planned(BaseModel):
    """An event of a trace. at: seconds since the storm began."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    at: float = Field(ge=0)
    kind: str


class Trace(BaseModel):
    """The events of one storm, in order of time, and where they come from."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    source: str
    events: tuple[Planned, ...]

    @classmethod
    def read(cls, path: Path) -> Trace:
        """Raises DataError for a file that is no trace."""
        try:
            found = cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as err:
            raise DataError(
                f"{path} is no trace of a storm: {why(err)}",
                fix="write one with: python -m bench.storm --print-trace > trace.json",
            ) from None
        if unknown := {event.kind for event in found.events} - KINDS.keys():
            raise DataError(
                f"{path}: unknown kind of event {min(unknown)!r}",
                fix=f"the kinds are {', '.join(KINDS)}",
            )
        return found


def drawn(seed: int, minutes: float, mean_sec: float, shape: float = 1.0) -> Trace:
    """Distances by Weibull with this shape and mean (1: exponential, so a Poisson process; 0.6: bursts);
    kinds by their shares, in random order. Equal arguments give equal traces."""
    chance = random.Random(f"{seed} {shape:g}")
    scale = mean_sec / math.gamma(1 + 1 / shape)
    times, at = [], 0.0
    while (at := at + chance.weibullvariate(scale, shape)) < 60 * minutes:
        times.append(round(at, 1))
    kinds = _kinds(len(times), chance)
    law = "Poisson" if shape == 1 else f"Weibull, shape {shape:g}"
    return Trace(
        source=f"{law}, mean {mean_sec:g} s, seed {seed}",
        events=tuple(Planned(at=at, kind=kind) for at, kind in zip(times, kinds, strict=True)),
    )


def _kinds(count: int, chance: random.Random) -> list[str]:
    """Each kind as often as its share says, up to one. Drawn one by one, a kind of one in ten would be
    missing in every third storm of ten events."""
    names, ends = list(KINDS), list(accumulate(kind.share for kind in KINDS.values()))
    first = chance.random()
    found = [
        names[min(bisect(ends, (first + number) / count), len(names) - 1)]
        for number in range(count)
    ]
    chance.shuffle(found)
    return found


def replayed(path: Path, mean_sec: float) -> Trace:
    """The ends of a site's jobs as events, their distances scaled to this mean.

    path: what `sacct -D -X -P -o Start,End,State` printed there; more columns are left alone. Raises
    DataError where it has no such columns, or fewer than two events.
    """
    ends = sorted(_ends(path))
    if len(ends) < 2 or ends[0][0] == ends[-1][0]:
        raise DataError(
            f"{path} has {len(ends)} events of {', '.join(OF_STATE)}: a trace needs two at least",
            cause="a short time, or only jobs that completed or were cancelled",
            fix="ask sacct for a longer time, with -S and -E, and for duplicates, with -D",
        )
    first, scale = ends[0][0], mean_sec * (len(ends) - 1) / (ends[-1][0] - ends[0][0])
    # The first event comes one distance after the beginning, as the others after those before.
    events = [
        Planned(at=round(mean_sec + (end - first) * scale, 1), kind=kind) for end, kind in ends
    ]
    return Trace(source=f"sacct ({path.name}), mean {mean_sec:g} s", events=tuple(events))


def _ends(path: Path) -> Iterator[tuple[float, str]]:
    """When jobs ended (seconds since the epoch), and by which kind of event."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as err:
        raise DataError(f"{path} cannot be read: {err}") from None
    header = lines[0].split("|") if lines else []
    if missing := [name for name in COLUMNS if name not in header]:
        raise DataError(
            f"{path} has no column {missing[0]} in its first line",
            fix="write the file with: sacct -D -X -P -o JobIDRaw,Start,End,State > FILE",
        )
    end, state = header.index("End"), header.index("State")
    for line in lines[1:]:
        cells = line.split("|")
        kind = OF_STATE.get(cells[state].split(" ")[0]) if len(cells) == len(header) else None
        if kind and cells[end] != "Unknown":
            try:
                yield datetime.fromisoformat(cells[end]).timestamp(), kind
            except ValueError:
                raise DataError(f"{path}: End is {cells[end]!r}, which is no time") from None


def why(err: Exception) -> str:
    """The first thing that is wrong with a file."""
    if not isinstance(err, ValidationError):
        return getattr(err, "strerror", "") or str(err)
    first = err.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}" if where else first["msg"]


def within(trace: Trace, minutes: float) -> Trace:
    """The events of the first minutes."""
    kept = tuple(event for event in trace.events if event.at < 60 * minutes)
    return trace.model_copy(update={"events": kept})


def shares_text(kinds: Sequence[str] = tuple(KINDS)) -> str:
    """The assumed shares, for a table."""
    return ", ".join(f"{KINDS[name].share:.0%} {KINDS[name].what}" for name in kinds)
