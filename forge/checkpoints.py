"""Training state to and from a checkpoint folder with torch.distributed.checkpoint.

Only tensors are stored, so nothing but the index (`.metadata`) is a pickle, and that one is read
with an unpickler that knows the index's own classes and nothing else.
"""

from __future__ import annotations

import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import blake3
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from forge.errors import DataError, ForgeError, UnfitError
from forge.manifest import digest_file
from forge.world import World

# As fast as raw write + fsync on local disks and network file systems.
WRITER_THREADS = 4
FULL_MIB = 16  # with less than this free, a failed write is put down to a full disk


def training_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, Any]]:
    """The tensors that make up training: weights and AdamW moments, by parameter name.

    Learning rate and order of samples are pure functions of the step, dropout of (seed, step,
    rank), so there is nothing else. All ranks call it; with FSDP2 the tensors are sharded.
    """
    optimizer_state: Any = get_optimizer_state_dict(model, optimizer)["state"]
    return {"model": dict(get_model_state_dict(model)), "optimizer": dict(optimizer_state)}


def write_state(state: dict[str, Any], folder: Path, world: World) -> dict[str, dict[str, Any]]:
    """Write the state into `folder`; digest and size of each file, by name. All ranks call it.

    Raises UnfitError on every rank when one cannot write.
    """
    writer = FileSystemWriter(folder, thread_count=WRITER_THREADS, sync_files=True)
    try:
        dcp.save(state, storage_writer=writer, process_group=world.control)
    except CheckpointException as err:  # a BaseException: no `except Exception` would see it
        raise _disk_error(err, folder) from None
    files: list[dict[str, Any] | None] = [None] * world.rank.world_size
    dist.all_gather_object(files, _own_files(folder, world.rank.rank), group=world.control)
    return {name: facts for part in files if part for name, facts in part.items()}


def _own_files(folder: Path, rank: int) -> dict[str, dict[str, Any]]:
    # DCP names a rank's files __RANK_NUMBER.distcp; the index is rank 0's.
    mine = sorted(folder.glob(f"__{rank}_*")) + ([folder / ".metadata"] if rank == 0 else [])
    return {path.name: {"bytes": path.stat().st_size, "digest": digest_file(path)} for path in mine}


def _disk_error(err: CheckpointException, folder: Path) -> ForgeError:
    causes = "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in err.failures.items())
    # torch's file writer tells of a full disk as an "unexpected pos".
    free_mib = shutil.disk_usage(folder).free / 2**20
    return UnfitError(
        f"cannot write checkpoint {folder}: {causes}",
        cause=f"no space left on the device: {free_mib:.1f} MiB are free"
        if free_mib < FULL_MIB
        else "the disk is read-only or failing",
        fix="free space and give the same command again; the last checkpoint is intact",
    )


def load_state(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    folder: Path,
    world: World,
) -> None:
    """Load a checkpoint of any world size into model and optimizer. All ranks call it.

    Raises DataError when names, shapes or files do not fit.
    """
    state = training_state(model, optimizer)
    read_tensors(state, folder, process_group=world.control)
    set_model_state_dict(model, state["model"])
    groups = get_optimizer_state_dict(model, optimizer)["param_groups"]
    set_optimizer_state_dict(
        model, optimizer, optim_state_dict={"state": state["optimizer"], "param_groups": groups}
    )


def read_tensors(state: dict[str, Any], folder: Path, **dcp_options: Any) -> None:
    """Fill the tensors of `state` in place from a checkpoint folder. DataError if they do not fit."""
    try:
        with warnings.catch_warnings():
            # Loading in a single process is meant.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(state, storage_reader=SafeReader(folder), **dcp_options)
    except CheckpointException as err:
        reasons = sorted({str(failure[0]) for failure in err.failures.values()})
        raise DataError(
            f"cannot load checkpoint {folder}: {'; '.join(reasons)}",
            cause="it was made by another model, or a file is damaged",
            fix=f"check it: forge validate {folder}",
        ) from None


class SafeReader(FileSystemReader):
    """DCP's reader, with an index reader that cannot be made to run code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata: Metadata = IndexUnpickler(file).load()
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class IndexUnpickler(pickle.Unpickler):
    """Reads a DCP index; any class that an index has no use for is a DataError."""

    # Everything that torch 2.13 puts into an index of tensors.
    ALLOWED = frozenset(
        {
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            *(("torch", name) for name in ("float32", "float64", "bfloat16", "float16", "int64")),
            *(
                ("torch.distributed.checkpoint.metadata", name)
                for name in (
                    "Metadata",
                    "MetadataIndex",
                    "TensorProperties",
                    "TensorStorageMetadata",
                    "ChunkStorageMetadata",
                    "_MEM_FORMAT_ENCODING",
                    "StorageMeta",
                )
            ),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("pathlib", "PosixPath"),
            ("pathlib._local", "PosixPath"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _memory_format  # so do early releases of Python 3.11 store the member of an enum
        if (module, name) not in self.ALLOWED:
            raise DataError(
                f"the checkpoint's index names {module}.{name}, which no index needs",
                cause="it was not written by Forge, or it was tampered with",
                fix="do not use this checkpoint",
            )
        return super().find_class(module, name)


def _memory_format(owner: Any, name: str = "") -> Any:
    """The one use that an index has for getattr; anything else is a DataError."""
    if owner is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise DataError(
            f"the checkpoint's index asks for attribute {name!r} of {owner!r}, which no index needs",
            cause="it was not written by Forge, or it was tampered with",
            fix="do not use this checkpoint",
        )
    return _MEM_FORMAT_ENCODING[name]


def weights_digest(model: torch.nn.Module) -> str | None:
    """blake3 over names, types, shapes and bytes of all weights, whole, on rank 0; None elsewhere.

    The same for every way of sharding. All ranks call it, since sharded weights are gathered one
    by one.
    """
    main = not dist.is_initialized() or dist.get_rank() == 0
    hasher = blake3.blake3()
    weights: dict[str, Any] = get_model_state_dict(model)
    for name, tensor in sorted(weights.items()):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if main:
            update_digest(hasher, name, whole)
    return hasher.hexdigest() if main else None


def update_digest(hasher: Any, name: str, tensor: torch.Tensor) -> None:
    """Add one named tensor to a weights digest."""
    hasher.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
    hasher.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
