"""Read the tensors that a program has saved with torch.distributed.checkpoint (DCP), running no code.

The index is read without unpickling it (checkpoint/pickled_index.py), each tensor by `torch.load` with
weights_only. Entries that are not tensors (learning rates, states of data loaders) are not read.
"""

from __future__ import annotations

import io
import pickletools
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from forge.checkpoint.index import DCP_INDEX
from forge.checkpoint.pickled_index import DTYPES, IndexedPart, read_pickled_index
from forge.core.errors import DataError
from forge.core.files import disk_trouble, is_file_below

# Where the functions are that the pickle of a tensor calls. torch writes it by protocol 2, which names
# each one by a GLOBAL.
CALLED = re.compile(r"torch[ .]|collections OrderedDict$")


@dataclass(frozen=True)
class TensorPart:
    """A stored part of a tensor: all of it, or one rank's shard."""

    name: str
    """Name of the tensor."""
    file: str
    tensor: torch.Tensor

    def is_finite(self) -> bool:
        """Return whether every number in this part is finite."""
        # isfinite does not know the types of 8 bits.
        small = self.tensor.dtype.itemsize == 1
        return bool(torch.isfinite(self.tensor.float() if small else self.tensor).all())


def floating_parts(folder: Path) -> Iterator[TensorPart]:
    """Every stored part of the floating-point tensors of a DCP directory, one at a time, file by file.

    Raises DataError for an index or a file that is corrupt, UnknownIndexError, UnfitError when the disk
    reports an error.
    """
    with disk_trouble(folder, "read"):
        parts = read_pickled_index(folder / DCP_INDEX)
    for part in sorted(parts, key=lambda part: (part.file, part.start)):
        if DTYPES[part.dtype].is_floating_point:
            yield TensorPart(part.name, part.file, _read(folder, part))


def _read(folder: Path, part: IndexedPart) -> torch.Tensor:
    """Raises DataError where a part is not there, or has another shape or type than the index says."""
    path = folder / part.file
    if not is_file_below(path, folder):
        raise DataError(f"{path.name}, which has {part.name}, is missing or a link out of {folder}")
    with disk_trouble(path, "read"), open(path, "rb") as file:
        if part.start + part.bytes > path.stat().st_size:
            raise DataError(f"{path.name} ends before {part.name} does")
        file.seek(part.start)
        data = io.BytesIO(file.read(part.bytes))
    try:
        _refuse_bomb(data)
        tensor = torch.load(data, map_location="cpu", weights_only=True)
    except Exception as err:  # any error: torch.load has many for corrupt bytes
        trouble = err.what if isinstance(err, DataError) else str(err)
        raise DataError(f"cannot read {part.name} in {path.name}: {trouble:.200}") from None
    if not isinstance(tensor, torch.Tensor):
        raise DataError(f"{part.name} in {path.name} is a {type(tensor).__name__}")
    if tensor.dtype != DTYPES[part.dtype] or list(tensor.shape) != part.shape:
        stored = f"{tensor.dtype}, shape {tuple(tensor.shape)}"
        raise DataError(f"{part.name} is stored as {stored}: the index says otherwise")
    if tensor.nbytes > part.bytes:  # a view that repeats few numbers
        raise DataError(f"{part.name} in {path.name} has fewer numbers than its shape")
    return tensor


def _refuse_bomb(data: io.BytesIO) -> None:
    """DataError for what would take more memory than it has bytes: torch unpacks compressed entries,
    which it never writes itself, and its pickle may ask for a bytearray of any size."""
    size = data.getbuffer().nbytes
    with zipfile.ZipFile(data) as entries:
        unpacked = sum(entry.file_size for entry in entries.infolist())
        if unpacked > size:
            raise DataError(f"{size} bytes would be unpacked to {unpacked}")
        for name in entries.namelist():
            if name.endswith("data.pkl"):
                _refuse_other_functions(entries.read(name))
    data.seek(0)


def _refuse_other_functions(pickled: bytes) -> None:
    for opcode, argument, _ in pickletools.genops(pickled):
        is_of_torch = argument and CALLED.match(str(argument))
        if opcode.name.endswith("GLOBAL") and not is_of_torch:
            raise DataError(f"its pickle calls {argument or 'a function'}, which no tensor needs")
