"""Training state to and from a checkpoint folder with torch.distributed.checkpoint.

Only tensors are stored, so nothing but the index (`.metadata`) is a pickle, and that one is read
with an unpickler that knows the index's own classes and nothing else.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import blake3
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from forge import points
from forge.errors import DataError, ForgeError, UnfitError
from forge.fabric import available_cores
from forge.manifest import disk_trouble
from forge.world import World, named

# Two to four files at once are as fast as raw write + fsync, on local disks and network file systems;
# more threads than cores are slower.
WRITER_THREADS = 4
WRITE_OUT_BYTES = 16 * 2**20
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


def state_bytes(state: dict[str, Any], *, local: bool = False) -> int:
    """Size of all tensors of a state; `local`: only what this rank holds of sharded ones."""
    return sum(
        tensor.numel() * tensor.element_size()
        for tensor in (
            t.to_local() if local and isinstance(t, DTensor) else t for t in _tensors(state)
        )
    )


def _tensors(state: dict[str, Any]) -> Iterator[torch.Tensor]:
    for value in state.values():
        if isinstance(value, dict):
            yield from _tensors(value)
        else:
            yield value


def is_finite(state: dict[str, Any]) -> bool:
    """Whether every number that this rank holds is finite; one pass, without a copy."""
    for tensor in _tensors(state):
        part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        # The extremes tell of every NaN and infinity, and need no tensor of booleans.
        if part.numel() and not all(bool(torch.isfinite(end)) for end in torch.aminmax(part)):
            return False
    return True


def write_state(state: dict[str, Any], folder: Path, world: World) -> dict[str, dict[str, Any]]:
    """Write the state into `folder`, durably; digest and size of each file, by name.

    All ranks call it, on world.control. Raises UnfitError on every rank when one cannot write.
    """
    # blake3 over whole files sees what a CRC of each tensor would.
    torch.serialization.set_crc32_options(False)
    threads = max(1, min(WRITER_THREADS, available_cores() // world.rank.local_world_size))
    writer = DigestingWriter(folder, thread_count=threads, sync_files=False)
    try:
        with named("write of the checkpoint"):
            dcp.save(state, storage_writer=writer, process_group=world.control)
    except CheckpointException as err:  # a BaseException: no `except Exception` would see it
        raise _write_error(err, folder) from None
    points.reach("save.written", folder)
    parts = world.gather_objects(writer.fs.files, "gather of digests")
    return {name: facts for part in parts for name, facts in part.items()}


class DigestingFiles(FileSystem):
    """Files of one save: each is digested on its way to the disk, and durable once it is closed."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, Any]] = {}  # by name: bytes, digest
        self.errors: list[BaseException] = []

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """DCP's hook for each file; its writer threads come here, each with a file of its own."""
        path = Path(path)
        try:
            with open(path, mode) as file:
                with DigestingStream(file, path) as stream:
                    yield stream
                points.reach("save.sync", path)
                os.fsync(file.fileno())
            self.files[path.name] = {"bytes": path.stat().st_size, "digest": stream.digest()}
        except BaseException as err:
            self.errors.append(err)
            raise

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """DCP's hook for its index, which gets its name when it is whole."""
        super().rename(path, new_path)
        self.files[Path(new_path).name] = self.files.pop(Path(path).name)


class DigestingStream(io.RawIOBase):
    """Writes into an open file, digests what it is given, and has the disk begin with it at once.

    When it is closed the file stays open for its fsync: whoever opened it closes it.
    The digest is that of what was meant to be written: whatever happens to the file, from the first
    byte on, is found when it is read back.
    """

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self.file, self.path = file, path
        self._hasher = blake3.blake3()
        self._begun = 0  # bytes that the disk has been told to write

    def write(self, data: Any) -> int:
        points.reach("save.write", self.path)
        self._hasher.update(data)
        written = self.file.write(data)
        if (end := self.tell()) - self._begun >= WRITE_OUT_BYTES:
            self.file.flush()
            _begin_write_out(self.file.fileno(), self._begun, end)
            self._begun = end
        return written

    def tell(self) -> int:
        return self.file.tell()

    def flush(self) -> None:
        self.file.flush()

    def digest(self) -> str:
        """blake3 of everything that was written, as 64 hex digits."""
        return str(self._hasher.hexdigest())


def _begin_write_out(fd: int, start: int, end: int) -> None:
    """Have the kernel send these bytes to the disk now, so that little is left for fsync.

    Linux starts the write-out of a range that is no longer needed (mm/fadvise.c).
    """
    with suppress(AttributeError, OSError):  # only a hint, and not on every system
        os.posix_fadvise(fd, start, end - start, os.POSIX_FADV_DONTNEED)


class DigestingWriter(FileSystemWriter):
    """DCP's writer, with digests, and with errors: what fails in one of its threads but the first
    is lost there, and the save would go on without those tensors (torch 2.13)."""

    fs: DigestingFiles

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fs = DigestingFiles()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written = super().write_data(plan, planner)
        if self.fs.errors:
            raise self.fs.errors[0]
        if len(written.value()) != len(plan.items):
            raise OSError(f"{len(written.value())} of {len(plan.items)} tensors were written")
        self._check_sizes(written.value())
        return written

    def _check_sizes(self, results: list[WriteResult]) -> None:
        """OSError when a file is not as long as what was written into it: it was cut meanwhile."""
        ends: dict[str, int] = {}
        for where in (result.storage_data for result in results):
            end = where.offset + where.length
            ends[where.relative_path] = max(end, ends.get(where.relative_path, 0))
        for name, end in ends.items():
            if self.fs.files[name]["bytes"] != end:
                raise OSError(
                    f"{name} has {self.fs.files[name]['bytes']} bytes, {end} were written"
                )


def _write_error(err: CheckpointException, folder: Path) -> ForgeError:
    """What to tell of a save that failed on some rank."""
    causes = sorted({f"rank {rank}: {failure[0]}" for rank, failure in err.failures.items()})
    numbers = {getattr(failure[0], "errno", None) for failure in err.failures.values()}
    # torch's file writer tells of a full disk as an "unexpected pos".
    with suppress(OSError):
        free_mib = shutil.disk_usage(folder).free / 2**20
        if numbers & {errno.ENOSPC, errno.EDQUOT} or free_mib < FULL_MIB:
            return UnfitError(
                f"cannot write checkpoint {folder}: {'; '.join(causes)}",
                cause=f"no space left on the device: {free_mib:.1f} MiB are free",
                fix="free space and give the same command again; the last checkpoint is intact",
            )
    return UnfitError(
        f"cannot write checkpoint {folder}: {'; '.join(causes)}",
        cause="the disk is read-only or failing",
        fix="give the same command again, or choose another folder for `results`; the last"
        " checkpoint is intact",
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
    group = world.beside().control
    what = "load of the checkpoint"

    def read() -> None:
        with named(what):
            read_tensors(state, folder, process_group=group)

    world.patiently(read, what)
    set_model_state_dict(model, state["model"])
    groups = get_optimizer_state_dict(model, optimizer)["param_groups"]
    set_optimizer_state_dict(
        model, optimizer, optim_state_dict={"state": state["optimizer"], "param_groups": groups}
    )


def read_tensors(state: dict[str, Any], folder: Path, **dcp_options: Any) -> None:
    """Fill the tensors of `state` in place from a checkpoint folder.

    Raises DataError if they do not fit, UnfitError when the disk reports an error.
    """
    try:
        with warnings.catch_warnings():
            # Loading in a single process is meant.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(state, storage_reader=SafeReader(folder), **dcp_options)
    except CheckpointException as err:
        for failure in err.failures.values():
            if isinstance(failure[0], OSError):
                with suppress(OSError), disk_trouble(folder, "read"):
                    raise failure[0] from None
        reasons = sorted({repr(failure[0]) for failure in err.failures.values()})
        raise DataError(
            f"cannot load checkpoint {folder}: {'; '.join(reasons)}",
            cause="it was made by another model, or a file is damaged",
            fix=f"check it: forge validate {folder}",
        ) from None


class SafeReader(FileSystemReader):
    """DCP's reader, with an index reader that cannot be made to run code.

    Tensors are read with torch.load(weights_only=True) already.
    """

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        points.reach("load.read", Path(self.path))
        return super().read_data(plan, planner)

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
