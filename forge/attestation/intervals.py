"""Which parts of a run can be trained again, and what a draw of some of them says of all.

An interval goes from one checkpoint that the statement lists to the next one that is here, or from the
first step of the run, which needs none. Checkpoints in between need not be here: their steps are trained
again all the same.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from forge.attestation.verify import Links, VerificationError, part
from forge.checkpoint.directory import Checkpoint
from forge.checkpoint.resume import CommittedCheckpoints
from forge.core.errors import DataError
from forge.core.paths import RunPaths


@dataclass(frozen=True)
class Interval:
    """Steps first + 1 to last. begin: the checkpoint of step `first`; None where the run begins there.
    end: that of step `last`; None where it is not here, and only the digest of its weights is known."""

    first: int
    last: int
    begin: Checkpoint | None
    end: Checkpoint | None

    def __str__(self) -> str:
        return f"steps {self.first + 1} to {self.last}"


@dataclass(frozen=True)
class Coverage:
    """What can be checked of a run. saved: steps of all checkpoints that the statement lists up to the
    exported one, without that of the start. can_start: whether its first step needs no other run and no
    pretrained weights. exported: the exported checkpoint, where it is here."""

    first: int
    saved: tuple[int, ...]
    can_start: bool
    intervals: tuple[Interval, ...]
    exported: Checkpoint | None

    @property
    def last(self) -> int:
        return self.saved[-1]

    @property
    def steps(self) -> int:
        """Of the run, up to the exported checkpoint."""
        return self.last - self.first

    def parts_in(self, intervals: Iterable[Interval]) -> int:
        """How many of the parts of the run, from one saved checkpoint to the next, these cover."""
        return sum(
            bisect_right(self.saved, one.last) - bisect_right(self.saved, one.first)
            for one in intervals
        )

    def chance(self, draws: int) -> float:
        """That so many draws find one part whose training was another one, wherever it is. Parts that
        cannot be covered count as unchecked."""
        if not self.intervals:
            return 0.0
        share = self.parts_in(self.intervals) / len(self.saved)
        return share * min(draws, len(self.intervals)) / len(self.intervals)


def coverage(links: Links, runs: Iterable[RunPaths]) -> Coverage:
    """What of the run of a statement can be trained again with the checkpoints in these runs, which are
    found by their digests. Only manifests are read."""
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
    intervals = tuple(_intervals(first, saved, here, can_start))
    return Coverage(first, saved, can_start, intervals, here.get(last))


def _names_a_start(links: Links) -> bool:
    """Whether the config names another run or weights to start from, which a true statement has among its
    parents, too: what a stranger's config names is not opened."""
    values = part(links["config"], "values", dict)
    return bool(values.get("parent") or part(values, "model", dict).get("init"))


def _found(stated: set[tuple[int, str]], runs: Iterable[RunPaths]) -> dict[int, Checkpoint]:
    """The checkpoints in these runs that the statement lists, by step."""
    found: dict[int, Checkpoint] = {}
    for checkpoints in map(CommittedCheckpoints, runs):
        for step, folder in checkpoints.by_step().items():
            with suppress(DataError, FileNotFoundError):  # incomplete, or pruned meanwhile
                checkpoint = checkpoints.open_complete(folder)
                if (step, checkpoint.digest) in stated:
                    found.setdefault(step, checkpoint)
    return found


def _intervals(
    first: int, saved: Sequence[int], here: dict[int, Checkpoint], can_start: bool
) -> Iterable[Interval]:
    before, begin = first, None
    is_known = can_start
    for step in saved:
        if end := here.get(step):
            if is_known:
                yield Interval(before, step, begin, end)
            before, begin, is_known = step, end, True


def drawn(intervals: Sequence[Interval], number: int, seed: int) -> list[Interval]:
    """So many of these, by step: those with the smallest SHA-256 of `SEED FIRST LAST`, so that anybody
    draws the same ones."""

    def place(one: Interval) -> str:
        return hashlib.sha256(f"{seed} {one.first} {one.last}".encode()).hexdigest()

    return sorted(sorted(intervals, key=place)[:number], key=lambda one: one.first)
