"""Output of `forge reproduce` about intervals that were retrained."""

from __future__ import annotations

from collections.abc import Iterable

from forge.attestation.verify import Links, printable
from forge.core.terminal import duration, show
from forge.plugins.attestation.certificate import Reproduction, Retrained
from forge.plugins.attestation.intervals import Coverage, seconds_of

MACHINES = {
    "another": ["on another machine than those that have trained the run"],
    "the same": ["on a machine that has trained the run, too: its own faults would come again"],
    "unknown": [],
}


def print_notes(notes: Iterable[str]) -> None:
    for note in notes:
        show(f"  note  {printable(note)}")


def print_not_drawn(covers: Coverage, links: Links) -> None:
    """Print that there is no time for some intervals."""
    number, least = len(covers.too_long), min(seconds_of(one, links) for one in covers.too_long)
    print_notes(
        [
            f"{number} of {number + len(covers.intervals)} intervals are not drawn: they took"
            f" {duration(least, precise=True)} and more in the run, which should be half of --minutes"
        ]
    )


def print_interval(result: Retrained) -> None:
    line, mark = (
        f"steps {result.first + 1} to {result.last}: ",
        "FAIL" if result.is_other else "ok  ",
    )
    if result.is_unchecked:
        mark, line = "note", f"{line}unchecked"
    elif result.outcome == "bitwise":
        line += "bitwise equal"
    else:
        line += "within the tolerance" if result.outcome == "within tolerance" else "other weights"
        if result.weights is not None:
            line += f", {result.weights:.2g} of the way apart, losses {result.loss or 0:.2g}"
    why = f" ({'; '.join(result.why)})" if result.why else ""
    show(f"  {mark}  {printable(line + why)}")


def print_summary(made: Reproduction, parts_checked: int) -> None:
    """Print the result, and how much of the run was retrained."""
    show(
        f"{made.result}: {made.steps_checked} of {made.steps} steps retrained"
        f" ({made.steps_coverable} could be)"
    )
    number = sum(not one.is_unchecked for one in made.intervals)
    which = f"in {number} interval{'s' * (number > 1)} drawn by seed {made.seed}"
    if made.seed is None:
        which = "all steps" if made.steps_checked == made.steps else "the steps that were named"
    show(f"{parts_checked} of {made.parts} part{'s' * (made.parts > 1)} of the run, {which}")
