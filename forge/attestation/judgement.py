"""Did training again end as the statement says: bitwise, within the tolerance, or otherwise, and why?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from forge.attestation.certificate import Outcome, TrainedAgain
from forge.attestation.intervals import Interval
from forge.attestation.sealed_difference import SealedDifference, sealed_difference
from forge.attestation.state_difference import StateDifference, state_difference
from forge.attestation.verify import Links, part
from forge.checkpoint.directory import Checkpoint
from forge.checkpoint.manifest import Code, Lineage
from forge.checkpoint.sealed import SealedCheckpoint
from forge.core.errors import DataError

MOST_NAMED = 5  # packages with their versions, or files, in one sentence
# Where bits may differ. docs/reproducibility.md has what was measured: other kernels and numbers of ranks
# stay a hundred times below it, one step at 1.1 times its learning rate is ten times above it.
TOLERANCE = {"weights": 1e-3, "loss": 1e-3}


def judged(
    interval: Interval[Checkpoint], made: Checkpoint, weights_digest: str, links: Links
) -> TrainedAgain:
    """Judge an interval. made: its end as it was trained again, with this digest of its
    weights."""
    why, end = [*may_differ(interval, made, links)], interval.end
    if end:
        apart = state_difference(made, end, interval.begin)
    else:
        is_same = weights_digest == links["export"].get("weights")
        apart = StateDifference(is_same, 0.0 if is_same else math.inf, 0.0 if is_same else math.inf)
    within = apart.weights <= TOLERANCE["weights"] and apart.loss <= TOLERANCE["loss"]
    outcome: Outcome = "within tolerance" if why and within else "other"
    if apart.is_bitwise:
        outcome = "bitwise"
    return TrainedAgain.of(interval, outcome, why, weights=apart.weights, loss=apart.loss)


def judged_program(
    interval: Interval[SealedCheckpoint], made: SealedCheckpoint, links: Links
) -> TrainedAgain:
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
    if apart.weights:
        why.append("with which CPU, GPU and packages the program ran is not recorded")
    weights = apart.weights or 0.0
    outcome: Outcome = "within tolerance" if weights <= TOLERANCE["weights"] else "other"
    if not weights:
        outcome = "bitwise"
    return TrainedAgain.of(interval, outcome, why, weights=weights)


def _listed(names: list[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def may_differ(interval: Interval[Checkpoint], made: Checkpoint, links: Links) -> Iterator[str]:
    """Differences between both trainings on which bits depend: hardware, kernels, torch, ranks. Code is
    not among it: another commit must not excuse another result."""
    now, then = made.manifest, interval.end.manifest if interval.end else None
    sizes = _world_sizes(interval, links)
    if sizes - {now.world_size}:
        yield f"{' and '.join(map(str, sorted(sizes)))} ranks then, {now.world_size} here"
    if then is None:
        return
    yield from hardware_differences(then.lineage, now.lineage)
    if now.why_not_compiled != then.why_not_compiled:
        yield "compiled on one side only"
    if then.lineage.config.train.shard == "node":
        yield "sharded over the ranks of a node, of which there was another number"
    if now.lineage.numerics.device == "cuda":
        yield "a GPU may add in any order"


def hardware_differences(then: Lineage, now: Lineage) -> Iterator[str]:
    """A sentence for each thing on which bits depend and that differs."""
    if now.hardware.cpu != then.hardware.cpu:
        yield _differs("CPU", then.hardware.cpu, now.hardware.cpu)
    if now.versions.torch != then.versions.torch:
        yield _differs("torch", then.versions.torch, now.versions.torch)
    ours, theirs = now.numerics.to_json(), then.numerics.to_json()
    for key in sorted(theirs):
        if ours.get(key) != theirs[key]:
            yield _differs(key, theirs[key], ours.get(key))


def _world_sizes(interval: Interval[Checkpoint], links: Links) -> set[int]:
    """World sizes of the launches that have trained the interval, by the statement."""
    launches = part(links["launches"], "launches", list)
    return {
        part(one, "world_size", int)
        for one in launches
        if part(one, "resumed_from", int) < interval.last
        and part(one, "last_step", int) > interval.first
    }


def differences(links: Links, now: Lineage) -> Iterator[str]:
    """Differences from the code and the environment of the statement, as far as it has them."""
    yield from code_differences(links, now.code)
    environment = links["environment"]
    versions, packages = environment.get("versions"), environment.get("packages")
    ours = now.versions.to_json()
    for name, version in sorted(versions.items()) if isinstance(versions, dict) else ():
        if version != ours.get(name):
            yield _differs(name, version, ours.get(name))
    if isinstance(packages, dict):
        yield from _other_packages(packages, now.packages or {}, known=ours)
    if environment.get("cpu") != now.hardware.cpu:
        yield _differs("CPU", environment.get("cpu"), now.hardware.cpu)


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
