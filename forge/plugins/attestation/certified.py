"""Results of `forge reproduce CHECKPOINT`, which retrains the steps up to a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

from forge.core.hooks import Finding
from forge.core.paths import CHECKPOINT_PREFIX, RunPaths, checkpoint_name
from forge.plugins.attestation.places import CERTIFICATES
from forge.plugins.attestation.records import Certified

WRONG = "NOT reproduced"
MOST_NAMED = 4  # nodes in one line


def results(paths: RunPaths) -> list[Certified]:
    """Results for the steps up to each checkpoint, by step; [] where nothing was retrained.
    Raises DataError for a record that cannot be read."""
    files = (paths.root / CERTIFICATES).glob(f"{CHECKPOINT_PREFIX}*.result.json")
    return sorted((Certified.read(file) for file in files), key=lambda one: one.last)


def described(one: Certified) -> str:
    """Such as `NOT reproduced: steps 901 to 1000, trained on node07, again on node08`."""
    steps = (
        f"steps up to {one.last}" if one.first is None else f"steps {one.first + 1} to {one.last}"
    )
    nodes = f"trained on {_names(one.trained_on)}, again on {one.again_on}"
    match one.result:
        case "reproduced":
            return f"{steps} reproduced, {nodes}"
        case "not reproduced":
            return f"{WRONG}: {steps}, {nodes}"
    return f"{steps} could not be retrained: {one.why.splitlines()[0] if one.why else 'no reason'}"


def _names(nodes: Sequence[str]) -> str:
    more = len(nodes) - MOST_NAMED
    names = ", ".join(nodes[:MOST_NAMED]) or "unknown nodes"
    return f"{names} and {more} more" if more > 0 else names


def findings(paths: RunPaths) -> list[Finding]:
    """The newest part whose steps did not give the same result again. Raises DataError."""
    wrong = [one for one in results(paths) if one.result == "not reproduced"]
    return [
        Finding(
            described(one),
            f"forge reproduce {paths.checkpoints / checkpoint_name(one.last)} on a third node",
        )
        for one in wrong[-1:]
    ]


def summary(found: Sequence[Certified]) -> list[str]:
    """Lines for people: how many parts were retrained with the same result, and each that was not;
    [] where none was tried."""
    if not found:
        return []
    good = [one for one in found if one.result == "reproduced"]
    equal = sum(one.is_bitwise for one in good)
    how = "bitwise equal" if equal == len(good) else f"as they were, {equal} bitwise equal"
    first = f"{len(good)} of {len(found)} parts retrained {how}"
    if same := sum(one.again_on in one.trained_on for one in good):
        first += f", {same} on a node that had trained it"  # whose own faults would come again
    return [first, *(described(one) for one in found if one not in good)]
