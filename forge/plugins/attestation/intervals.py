"""Parts of a run that can be retrained, and a draw of some of them.

An interval goes from one checkpoint that the statement lists to the next one that is here, or from the
first step of the run, which needs none. Checkpoints in between need not be here: their steps are trained
again all the same.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from forge.attestation.verify import Links, VerificationError, part
from forge.checkpoint.checkpoints import RunCheckpoints, SavedCheckpoint
from forge.core.errors import DataError
from forge.plugins.attestation.reduce import stated_values

NUMBERS = 10**12  # of steps and seconds; with larger ones of a stranger nothing is computed

Saved = TypeVar("Saved", bound=SavedCheckpoint)


@dataclass(frozen=True)
class Interval(Generic[Saved]):
    """Steps first + 1 to last. begin: the checkpoint of step `first`; None where the run begins there.
    end: that of step `last`; None where it is not here, and only the digest of its weights is known."""

    first: int
    last: int
    begin: Saved | None
    end: Saved | None

    def __str__(self) -> str:
        return f"steps {self.first + 1} to {self.last}"

    @property
    def checkpoints(self) -> list[Saved]:
        """Its checkpoints, at begin and end, that are here."""
        return [one for one in (self.begin, self.end) if one]


@dataclass(frozen=True)
class Coverage(Generic[Saved]):
    """Intervals of a run that can be checked. saved: steps of all checkpoints that the statement lists up
    to the exported one, without that of the start. can_start: whether its first step needs no other run
    and no pretrained weights. too_long: intervals for which there is no time. exported: the exported
    checkpoint, where it is here."""

    first: int
    saved: tuple[int, ...]
    can_start: bool
    intervals: tuple[Interval[Saved], ...]
    too_long: tuple[Interval[Saved], ...]
    exported: Saved | None

    @property
    def last(self) -> int:
        return self.saved[-1]

    @property
    def steps(self) -> int:
        """Steps of the run up to the exported checkpoint."""
        return self.last - self.first

    def parts_in(self, intervals: Iterable[Interval[Saved]]) -> int:
        """Count the parts of the run, from one saved checkpoint to the next, in these intervals."""
        return sum(
            bisect_right(self.saved, one.last) - bisect_right(self.saved, one.first)
            for one in intervals
        )


def coverage(
    links: Links,
    runs: Iterable[RunCheckpoints],
    most_sec: float = math.inf,
    *,
    never_made_again: Collection[int] = (),
) -> Coverage[Any]:
    """Coverage: parts of the run of a statement that can be retrained with the checkpoints of these
    runs, which are found by their digests, in intervals that took so many seconds at most. Only manifests
    are read.

    never_made_again: steps at whose checkpoints no interval ends.
    """
    last = part(links["export"], "step", int)
    stated = {
        (part(one, "step", int), str(one.get("blake3")))
        for one in part(links["checkpoints"], "saved", list)
    }
    parent, weights = links["parents"].get("checkpoint"), links["parents"].get("weights")
    first = part(parent, "step", int) if parent else 0
    saved = tuple(sorted({step for step, _ in stated if first < step <= last}))
    if not saved or saved[-1] != last:
        raise VerificationError(
            f"no checkpoint of the statement is between steps {first} and {last}"
        )
    here = _found(stated, runs)
    can_start = not parent and not weights and not _names_a_start(links)
    intervals = [*_intervals(first, saved, here, can_start, never_made_again)]
    short = tuple(one for one in intervals if seconds_of(one, links) <= most_sec)
    too_long = tuple(one for one in intervals if one not in short)
    return Coverage(first, saved, can_start, short, too_long, here.get(last))


def seconds_of(interval: Interval[Any], links: Links) -> float:
    """Estimate the time that an interval took in the run: by the launch of the statement that was fastest
    among those that had some of its steps, start and evaluations included. 0 without any. A statement
    that claims more than it took has fewer steps checked, which the certificate says."""
    rates = []
    for launch in part(links["launches"], "launches", list):
        begin, end = (part(launch, key, int) for key in ("resumed_from", "last_step"))
        has_steps = begin < end <= NUMBERS and begin < interval.last and interval.first < end
        if has_steps:
            seconds = _seconds(launch, "ended") - _seconds(launch, "started")
            rates.append(max(0.0, seconds) / (end - begin))
    return min(rates, default=0.0) * min(interval.last - interval.first, NUMBERS)


def _seconds(launch: Mapping[str, Any], key: str) -> float:
    value = launch.get(key)
    return value if isinstance(value, int | float) and 0 <= value <= NUMBERS else 0.0


def _names_a_start(links: Links) -> bool:
    """Return whether the config names another run or weights to start from, which a true statement has
    among its parents, too: what a stranger's config names is not opened."""
    if "program" in links:  # which begins from nothing that Forge knows
        return False
    values = stated_values(links)
    return bool(values.get("parent") or part(values, "model", dict).get("init"))


def _found(
    stated: set[tuple[int, str]], runs: Iterable[RunCheckpoints]
) -> dict[int, SavedCheckpoint]:
    """The checkpoints of these runs that the statement lists, by step."""
    found: dict[int, SavedCheckpoint] = {}
    for checkpoints in runs:
        for step, folder in checkpoints.by_step().items():
            with suppress(DataError, FileNotFoundError):  # incomplete, or pruned meanwhile
                checkpoint = checkpoints.open_complete(folder)
                if (step, checkpoint.digest) in stated:
                    found.setdefault(step, checkpoint)
    return found


def _intervals(
    first: int,
    saved: Sequence[int],
    here: dict[int, Saved],
    can_start: bool,
    never_made_again: Collection[int],
) -> Iterable[Interval[Saved]]:
    before, begin = first, None
    is_known = can_start
    for step in saved:
        if step not in never_made_again and (end := here.get(step)):
            if is_known:
                yield Interval(before, step, begin, end)
            before, begin, is_known = step, end, True


def drawn(intervals: Sequence[Interval[Saved]], number: int, seed: int) -> list[Interval[Saved]]:
    """Draw `number` of these intervals, in order of step: those with the smallest SHA-256 of `SEED FIRST
    LAST`, so that anybody draws the same ones."""

    def place(one: Interval[Saved]) -> str:
        return hashlib.sha256(f"{seed} {one.first} {one.last}".encode()).hexdigest()

    return sorted(sorted(intervals, key=place)[:number], key=lambda one: one.first)
