"""Difference between two checkpoints of another program, by what can be read without running code.

Files are compared by digest. Of those that differ the tensors are read in safetensors files, and in
directories of torch.distributed.checkpoint. Other files, such as pickles, are not read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from forge.checkpoint.index import DCP_INDEX
from forge.checkpoint.sealed import SealedCheckpoint
from forge.core.errors import DataError
from forge.core.files import disk_trouble

if TYPE_CHECKING:
    import torch

SAFETENSORS = ".safetensors"
NamedTensor = tuple[str, "torch.Tensor"]


@dataclass(frozen=True)
class SealedDifference:
    """weights: the norm of the difference of all tensors in files that differ, as a share of how far
    these went in the interval (from 0 where it has no first checkpoint); inf where tensors or their
    shapes differ; None where files differ, and no file of the checkpoint has tensors that can be read.
    unread: the files that differ, and whose tensors are not read."""

    weights: float | None
    unread: list[str]


def sealed_difference(
    made: SealedCheckpoint, stated: SealedCheckpoint, begin: SealedCheckpoint | None
) -> SealedDifference:
    """Compare the checkpoint that was made again with the stated one. begin: where both began.

    Raises DataError where tensors cannot be read, UnfitError where the disk reports an error.
    """
    ours, theirs = made.manifest.files, stated.manifest.files
    other = sorted(
        name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)
    )
    read = [name for name in other if _has_tensors(name, stated)]
    unread = [name or stated.folder.name for name in other if name not in read]
    if not other:
        return SealedDifference(0.0, [])
    if not read:
        has_tensors = any(_has_tensors(name, stated) for name in theirs)
        return SealedDifference(0.0 if has_tensors else None, unread)
    if any(name not in ours or name not in theirs for name in read):
        return SealedDifference(math.inf, unread)
    return SealedDifference(_apart(made, stated, begin, read), unread)


def _has_tensors(name: str, checkpoint: SealedCheckpoint) -> bool:
    """Return whether a file has tensors that can be read; of a directory of torch.distributed.checkpoint
    each file counts, its index too."""
    file_name = name or checkpoint.folder.name
    indexed = {
        str(Path(one).parent) for one in checkpoint.manifest.files if Path(one).name == DCP_INDEX
    }
    return file_name.endswith(SAFETENSORS) or (bool(name) and str(Path(name).parent) in indexed)


def _apart(
    made: SealedCheckpoint,
    stated: SealedCheckpoint,
    begin: SealedCheckpoint | None,
    names: list[str],
) -> float:
    """Return the `SealedDifference.weights` of these files."""
    apart = moved = 0.0
    before = _tensors(begin, names) if begin else iter(())
    for one, other in zip_longest(_tensors(made, names), _tensors(stated, names)):
        if one is None or other is None or _shape(one) != _shape(other):
            return math.inf
        numbers = other[1].double()
        apart += float((one[1].double() - numbers).square().sum())
        first = next(before, None)
        if first and _shape(first) == _shape(other):
            numbers = numbers - first[1].double()
        moved += float(numbers.square().sum())
    if not apart:
        return 0.0  # what differs is no number, such as the order of an index
    return math.sqrt(apart / moved) if moved else math.inf


def _shape(tensor: NamedTensor) -> tuple[str, list[int], torch.dtype]:
    name, values = tensor
    return name, [*values.shape], values.dtype


def _tensors(checkpoint: SealedCheckpoint, names: list[str]) -> Iterator[NamedTensor]:
    """The tensors in those of these files that it has, one at a time, in an order that two checkpoints
    with equal tensors share."""
    from safetensors import SafetensorError, safe_open

    from forge.checkpoint.program_tensors import floating_parts

    names = [name for name in names if name in checkpoint.manifest.files]
    for name in names:
        if not (name or checkpoint.folder.name).endswith(SAFETENSORS):
            continue
        path = checkpoint.folder / name if name else checkpoint.folder
        try:
            with disk_trouble(path, "read"), safe_open(path, framework="pt") as file:
                for tensor in sorted(file.keys()):
                    yield f"{name} {tensor}", file.get_tensor(tensor)
        except SafetensorError as err:
            raise DataError(f"{path} cannot be read: {err}") from None
    folders = {Path(name).parent for name in names if name and not name.endswith(SAFETENSORS)}
    for folder in sorted(folders):
        for indexed in floating_parts(checkpoint.folder / folder):
            yield f"{folder} {indexed.file} {indexed.name}", indexed.tensor
