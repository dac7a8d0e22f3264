"""Did retraining end as the statement says: bitwise, within the tolerance, or otherwise?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from forge.attestation.verify import Links, part
from forge.checkpoint.directory import Checkpoint
from forge.checkpoint.manifest import Code, Lineage
from forge.checkpoint.sealed import SealedCheckpoint
from forge.core.errors import DataError
from forge.plugins.attestation.certificate import Outcome, Retrained
from forge.plugins.attestation.intervals import Interval
from forge.plugins.attestation.sealed_difference import SealedDifference, sealed_difference
from forge.plugins.attestation.state_difference import StateDifference, state_difference
from forge.validation.replay import same_arithmetic

MOST_NAMED = 5  # packages with their versions, or files, in one sentence
# Where bits may differ. docs/measured/reproducibility.md has what was measured: other kernels and
# numbers of ranks stay a hundred times below it, one step at 1.1 times its learning rate is ten times
# above it.
TOLERANCE = {"weights": 1e-3, "loss": 1e-3}


def judged(
    interval: Interval[Checkpoint], made: Checkpoint, weights_digest: str, links: Links
) -> Retrained:
    """Judge an interval. made: its end as it was retrained, with this digest of its
    weights."""
    if end := interval.end:
        apart = state_difference(made, end, interval.begin)
    else:
        is_same = weights_digest == links["export"].get("weights")
        apart = StateDifference(is_same, 0.0 if is_same else math.inf, 0.0 if is_same else math.inf)
    within = apart.weights <= TOLERANCE["weights"] and apart.loss <= TOLERANCE["loss"]
    outcome: Outcome = "other"
    if apart.is_bitwise:
        outcome = "bitwise"
    elif within and not must_be_bitwise(interval, made, links):
        outcome = "within tolerance"
    return Retrained.of(interval, outcome, [], weights=apart.weights, loss=apart.loss)


def judged_program(
    interval: Interval[SealedCheckpoint], made: SealedCheckpoint, links: Links
) -> Retrained:
    """The same for another program. Bits may always differ: with which CPU, GPU and packages it ran is
    not recorded. Raises DataError where files differ, and none of these has tensors that can be read."""
    end, why = interval.end, []
    digest = end.digest if end else links["export"].get("checkpoint")
    apart = SealedDifference(0.0, [])
    if made.digest != digest:
        if end is None:
            raise DataError(
                f"other files than in the statement, and step {interval.last} is not here"
            )
        apart = sealed_difference(made, end, interval.begin)
        if apart.weights is None:
            raise DataError(
                f"other files, whose tensors are not read: {_listed(apart.unread)}",
                cause="pickles are not opened; files of a program may also have a time or a path in them",
                fix="let the program save weights as safetensors, or by torch.distributed.checkpoint",
            )
    if apart.unread:
        why.append(f"other files, whose tensors are not read: {_listed(apart.unread)}")
    weights = apart.weights or 0.0
    outcome: Outcome = "within tolerance" if weights <= TOLERANCE["weights"] else "other"
    if not weights:
        outcome = "bitwise"
    return Retrained.of(interval, outcome, why, weights=weights)


def _listed(names: list[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def must_be_bitwise(interval: Interval[Checkpoint], made: Checkpoint, links: Links) -> bool:
    """Decide whether both trainings must give the same bits. Code is not asked: another commit must not
    excuse another result."""
    end, now = interval.end, made.manifest
    if end is None:
        return True
    then = end.manifest
    return (
        same_arithmetic(then.lineage, now.lineage.numerics)
        and _world_sizes(interval, links) <= {now.world_size}
        and bool(then.why_not_compiled) == bool(now.why_not_compiled)
        # The ranks of a node add first, and here there may be another number of them.
        and then.lineage.config.train.shard != "node"
    )


def _world_sizes(interval: Interval[Checkpoint], links: Links) -> set[int]:
    """World sizes of the launches that have trained the interval, by the statement."""
    launches = part(links["launches"], "launches", list)
    return {
        part(one, "world_size", int)
        for one in launches
        if part(one, "resumed_from", int) < interval.last
        and part(one, "last_step", int) > interval.first
    }


def differences(interval: Interval[Checkpoint], made: Checkpoint, links: Links) -> Iterator[str]:
    """Differences from the code and the environment of the statement, as far as it has them, and from how
    the interval was trained, which may have been on another machine."""
    end, now, environment = interval.end, made.manifest, links["environment"]
    ours = _environment(now.lineage)
    yield from code_differences(links, now.lineage.code)
    yield from _other_environment(environment, ours)
    if isinstance(packages := environment.get("packages"), dict):
        yield from _other_packages(packages, now.lineage.packages or {}, known=ours["versions"])
    sizes = _world_sizes(interval, links)
    if sizes - {now.world_size}:
        yield f"{' and '.join(map(str, sorted(sizes)))} ranks then, {now.world_size} here"
    if end:
        yield from _other_environment(_environment(end.manifest.lineage), ours)
        if bool(end.manifest.why_not_compiled) != bool(now.why_not_compiled):
            yield "compiled on one side only"


def _environment(lineage: Lineage) -> dict[str, Any]:
    """Versions, numerics and CPU, as the link `environment` of a statement has them."""
    return {
        "versions": lineage.versions.to_json(),
        "numerics": lineage.numerics.to_json(),
        "cpu": lineage.hardware.cpu,
    }


def _other_environment(stated: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[str]:
    for group in ("versions", "numerics"):
        values = stated.get(group)
        for name, value in sorted(values.items()) if isinstance(values, dict) else ():
            if value != ours[group].get(name):
                yield _differs(name, value, ours[group].get(name))
    if stated.get("cpu") != ours["cpu"]:
        yield _differs("CPU", stated.get("cpu"), ours["cpu"])


def _other_packages(
    stated: dict[str, Any], ours: dict[str, str], *, known: dict[str, Any]
) -> Iterator[str]:
    """One sentence for all packages of other versions, or on one side only. known: those that have a
    sentence of their own."""
    names = sorted((stated.keys() | ours.keys()) - known.keys(), key=str.lower)
    other = [name for name in names if stated.get(name) != ours.get(name)]
    if other:
        shown = "; ".join(_differs(n, stated.get(n), ours.get(n)) for n in other[:MOST_NAMED])
        more = len(other) - MOST_NAMED
        yield f"other packages: {shown}" + (f"; and {more} more" if more > 0 else "")


def code_differences(links: Links, here: Code) -> Iterator[str]:
    """Differences between the code of Forge in the statement and that here."""
    stated = part(links["code"], "forge", dict)
    for key in ("version", "commit", "diff"):
        if stated.get(key) != getattr(here, key):
            what = f"{'uncommitted changes' if key == 'diff' else key} of Forge"
            yield _differs(what, stated.get(key), getattr(here, key))


def _differs(what: str, then: object, now: object) -> str:
    return f"{what} {_short(then)} then, {_short(now)} here"


def _short(value: object) -> str:
    return "none" if value is None else f"{value!s:.60}"
