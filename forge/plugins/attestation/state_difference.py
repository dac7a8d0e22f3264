"""Difference between two checkpoints of one step: the same bits, or its size. No torch.

Tensors are compared by name, wherever their parts are in the files: these depend on the number of ranks
and of cores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forge.checkpoint.directory import Checkpoint
from forge.checkpoint.index import StoredTensor
from forge.checkpoint.stored_tensors import WEIGHTS, numbers_of, read_tensor, stored_tensors


@dataclass(frozen=True)
class StateDifference:
    """weights: the norm of the difference of all weights, as a share of how far they went in the interval
    (from 0 where it has no first checkpoint); inf where tensors or their shapes differ. loss: the largest
    difference of a rank's recorded reference-batch loss, in nats per token."""

    is_bitwise: bool
    weights: float
    loss: float


def state_difference(
    made: Checkpoint, stated: Checkpoint, begin: Checkpoint | None
) -> StateDifference:
    """Compare the checkpoint that was made again with the stated one. begin: where both began.

    Files are read as their manifests name them, whose digests the caller has verified. Raises DataError
    where an index or a file cannot be read.
    """
    loss = _loss_difference(made, stated)
    if made.manifest.files == stated.manifest.files:
        return StateDifference(True, 0.0, loss)
    ours, theirs = stored_tensors(made), stored_tensors(stated)
    if _shapes(ours) != _shapes(theirs):
        return StateDifference(False, math.inf, loss)
    before = stored_tensors(begin) if begin else {}
    apart = moved = 0.0
    is_bitwise = True
    for name in theirs:
        one, other = read_tensor(made, ours[name]), read_tensor(stated, theirs[name])
        is_bitwise = is_bitwise and one.tobytes() == other.tobytes()
        if name.startswith(WEIGHTS):
            numbers = numbers_of(other, theirs[name])
            apart += _squares(numbers_of(one, ours[name]) - numbers)
            if begin and name in before:
                numbers = numbers - numbers_of(read_tensor(begin, before[name]), before[name])
            moved += _squares(numbers)
    return StateDifference(is_bitwise, math.sqrt(apart / moved) if moved else math.inf, loss)


def _loss_difference(made: Checkpoint, stated: Checkpoint) -> float:
    """Largest difference of reference losses, over the ranks that both have: rank r computes its loss on
    the same samples in any world."""
    ours, theirs = made.manifest.reference, stated.manifest.reference
    if ours.samples != theirs.samples:
        return math.inf
    pairs = zip(ours.losses, theirs.losses, strict=False)
    return max((abs(one - other) for one, other in pairs), default=math.inf)


def _shapes(tensors: dict[str, StoredTensor]) -> dict[str, tuple[str, list[int]]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def _squares(numbers: NDArray[np.float64]) -> float:
    return float(np.sum(np.square(numbers)))
