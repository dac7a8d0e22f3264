"""Weights of a merge: its formulas, and the sums. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from forge.checkpoint.directory import Checkpoint
from forge.checkpoint.stored_tensors import WEIGHTS, numbers_of, read_tensor, stored_tensors
from forge.core.errors import DataError

# Weight c_i of the i-th of n checkpoints, at step s_i. By the second form the updates up to s_i have the
# factor d_i, as by a learning rate that decays as 1 - sqrt does (https://arxiv.org/abs/2507.17634).
FORMS = {
    "mean": "c_i = 1 / n",
    "minus-sqrt": "c_i = d_i - d_(i+1), d_i = 1 - sqrt((n - 1) / n * (s_i - s_1) / (s_n - s_1)),"
    " d_(n+1) = 0",
    "weights": "c_i as given",
}
BLOCK = 2**16  # numbers


def weights_of(form: str, steps: Sequence[int]) -> list[float]:
    """Weights by the formula of a form that has one. steps: two or more, ascending."""
    n, first, last = len(steps), steps[0], steps[-1]
    if form == "mean":
        return [1 / n] * n
    kept = [1 - math.sqrt((n - 1) * (step - first) / (n * (last - first))) for step in steps]
    return [one - after for one, after in pairwise([*kept, 0.0])]


def merged_weights(
    parents: Sequence[tuple[Checkpoint, float]],
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """The weights of a merge by name in the checkpoint, one at a time: the sum of weight times parent, in
    fp64 and in this order, rounded once to fp32. Digests are the caller's to verify. Raises DataError
    where the parents are of different models, and for a number that is not finite."""
    indices = [stored_tensors(checkpoint) for checkpoint, _ in parents]
    names = [sorted(name for name in index if name.startswith(WEIGHTS)) for index in indices]
    for name in names[0]:
        tensors = [index.get(name) for index in indices]
        kinds = {(one.dtype, *one.shape) if one else None for one in tensors}
        if len(kinds) > 1 or tensors[0] is None or tensors[0].dtype != "float32":
            raise DataError(f"{name} has not the same shape in fp32 in all checkpoints: {kinds}")
        total = np.zeros(math.prod(tensors[0].shape))
        for (checkpoint, weight), tensor in zip(parents, tensors, strict=True):
            assert tensor
            numbers = read_tensor(checkpoint, tensor).reshape(-1)
            for start in range(0, total.size, BLOCK):  # an fp64 copy of a block, not of the tensor
                block = slice(start, start + BLOCK)
                total[block] += weight * numbers_of(numbers[block], tensor)
        with np.errstate(over="ignore"):
            rounded = total.astype("<f4").reshape(tensors[0].shape)
        if not np.isfinite(rounded).all():
            raise DataError(
                f"{name} has numbers that are not finite",
                cause="a checkpoint of a run that has diverged",
                fix=f"forge validate {parents[0][0].folder.parent.parent} --all says which",
            )
        yield name, rounded
    if len({tuple(one) for one in names}) > 1:
        raise DataError("the checkpoints are of different models")
