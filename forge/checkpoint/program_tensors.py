"""Read the tensors that a program has saved with torch.distributed.checkpoint (DCP), running no code.

The index is read by Forge's own unpickler, each tensor by `torch.load` with weights_only. Entries that
are no tensors (learning rates, states of data loaders) are pickles, and are not read.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from forge.checkpoint import storage
from forge.core.errors import DataError
from forge.core.files import disk_trouble
from forge.launch.torch_private import StorageInfo


class UnknownIndexError(DataError):
    """The index has a class that Forge does not know: of a newer torch, or of the program itself."""


@dataclass(frozen=True)
class Part:
    """A stored part of a tensor: all of it, or one rank's shard."""

    name: str
    """Of the tensor."""
    file: str
    tensor: torch.Tensor

    def is_finite(self) -> bool:
        """Whether every number in it is."""
        # isfinite does not know the types of 8 bits.
        small = self.tensor.dtype.itemsize == 1
        return bool(torch.isfinite(self.tensor.float() if small else self.tensor).all())


def floating_parts(folder: Path) -> Iterator[Part]:
    """Every stored part of the floating-point tensors of a DCP directory, one at a time, file by file.

    Raises DataError for an index or a file that is corrupt, UnknownIndexError, UnfitError when the disk
    reports an error.
    """
    with disk_trouble(folder, "read"):
        index = storage.read_index(folder / ".metadata", ProgramIndexUnpickler)
    for where, info in sorted(index.storage_data.items(), key=lambda item: _place(item[1])):
        entry = index.state_dict_metadata[where.fqn]
        if isinstance(entry, TensorStorageMetadata) and entry.properties.dtype.is_floating_point:
            tensor = _read(folder / info.relative_path, info, where)
            _require_as_told(tensor, entry, where)
            yield Part(where.fqn, info.relative_path, tensor)


def _place(info: StorageInfo) -> tuple[str, int]:
    return info.relative_path, info.offset


def _read(path: Path, info: StorageInfo, where: MetadataIndex) -> torch.Tensor:
    if not path.is_file():
        raise DataError(f"{path.name} is missing, which has {where.fqn}")
    with disk_trouble(path, "read"), open(path, "rb") as file:
        file.seek(info.offset)
        data = io.BytesIO(file.read(info.length))
    try:
        tensor = torch.load(data, map_location="cpu", weights_only=True)
    except Exception as err:  # any error: torch.load has many for corrupt bytes
        raise DataError(f"cannot read {where.fqn} in {path.name}: {err!s:.200}") from None
    if not isinstance(tensor, torch.Tensor):
        raise DataError(f"{where.fqn} in {path.name} is a {type(tensor).__name__}")
    return tensor


def _require_as_told(
    tensor: torch.Tensor, entry: TensorStorageMetadata, where: MetadataIndex
) -> None:
    """DataError where a part has another shape or type than the index says."""
    told = [chunk.sizes for chunk in entry.chunks if chunk.offsets == where.offset]
    if tensor.dtype != entry.properties.dtype or tensor.shape not in told:
        found = f"{tensor.dtype}, shape {tuple(tensor.shape)}"
        raise DataError(f"{where.fqn} is stored as {found}: the index says otherwise")


class ProgramIndexUnpickler(storage.IndexUnpickler):
    """Reads the index of a program's checkpoint, with tensors of all types, and other entries."""

    ALLOWED = (
        storage.IndexUnpickler.ALLOWED
        | {("torch.distributed.checkpoint.metadata", "BytesStorageMetadata")}
        | {("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    )

    def find_class(self, module: str, name: str) -> Any:
        # What a planted index would call is in the standard library, and refused as such.
        is_foreign = module.partition(".")[0] not in sys.stdlib_module_names
        if (module, name) not in self.ALLOWED and is_foreign:
            raise UnknownIndexError(f"its index names {module}.{name}, which Forge does not know")
        return super().find_class(module, name)
