"""Difference between two checkpoints of one step: the same bits, or its size. No torch.

Tensors are compared by name, wherever their parts are in the files: these depend on the number of ranks
and of cores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forge.checkpoint.directory import Checkpoint
from forge.checkpoint.index import INDEX, Index, StoredTensor
from forge.core.errors import DataError
from forge.core.files import disk_trouble, open_regular, plain_name

# As torch names its types. NumPy has no bfloat16: it is the upper half of a float32.
NUMPY_TYPES = {
    **{"float32": "<f4", "float64": "<f8", "float16": "<f2", "int64": "<i8"},
    "bfloat16": "<u2",
}
WEIGHTS = "model."  # names of weights begin so, those of optimizer states do not


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
    ours, theirs = _index(made), _index(stated)
    if _shapes(ours) != _shapes(theirs):
        return StateDifference(False, math.inf, loss)
    before = _index(begin) if begin else {}
    apart = moved = 0.0
    is_bitwise = True
    for name in theirs:
        one, other = _tensor(made, ours[name]), _tensor(stated, theirs[name])
        is_bitwise = is_bitwise and one.tobytes() == other.tobytes()
        if name.startswith(WEIGHTS):
            numbers = _numbers(other, theirs[name])
            apart += _squares(_numbers(one, ours[name]) - numbers)
            if begin and name in before:
                numbers = numbers - _numbers(_tensor(begin, before[name]), before[name])
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


def _index(checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    return Index.read(checkpoint.folder / INDEX).tensors


def _shapes(tensors: dict[str, StoredTensor]) -> dict[str, tuple[str, list[int]]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def _tensor(checkpoint: Checkpoint, tensor: StoredTensor) -> NDArray[np.generic]:
    """A whole tensor, as the numbers of its type in NumPy."""
    sizes = {name: file.bytes for name, file in checkpoint.manifest.files.items()}
    for part in tensor.parts:  # before memory is taken for them
        if part.start + part.bytes > sizes.get(part.file, 0):
            raise DataError(f"{checkpoint.folder / part.file} ends before what {INDEX} has in it")
    whole = np.empty(tensor.shape, NUMPY_TYPES[tensor.dtype])
    for part in tensor.parts:
        path = checkpoint.folder / plain_name(part.file)
        with disk_trouble(path, "read"), open_regular(path) as file:
            file.seek(part.start)
            data = file.read(part.bytes)
        slices = tuple(_slices(part.offset, part.shape))
        whole[slices] = np.frombuffer(data, whole.dtype).reshape(part.shape)
    return whole


def _slices(offset: list[int], shape: list[int]) -> Iterator[slice]:
    for begin, length in zip(offset, shape, strict=True):
        yield slice(begin, begin + length)


def _numbers(tensor: NDArray[np.generic], stored: StoredTensor) -> NDArray[np.float64]:
    if stored.dtype == "bfloat16":
        tensor = (tensor.astype("<u4") << 16).view("<f4")
    return tensor.astype(np.float64)


def _squares(numbers: NDArray[np.float64]) -> float:
    return float(np.sum(np.square(numbers)))
