"""Single tensors of a checkpoint as NumPy arrays, whatever ranks have written them. No torch."""

from __future__ import annotations

from collections.abc import Iterator

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


def stored_tensors(checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    """The tensors by name, as the index has them. Raises DataError."""
    return Index.read(checkpoint.folder / INDEX).tensors


def read_tensor(checkpoint: Checkpoint, tensor: StoredTensor) -> NDArray[np.generic]:
    """A whole tensor, as the numbers of its type in NumPy. Digests are the caller's to verify. Raises
    DataError for a file that ends too early."""
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


def numbers_of(tensor: NDArray[np.generic], stored: StoredTensor) -> NDArray[np.float64]:
    """The numbers of a stored tensor, or of a part of it, in fp64: exact."""
    if stored.dtype == "bfloat16":
        tensor = (tensor.astype("<u4") << 16).view("<f4")
    return tensor.astype(np.float64)
