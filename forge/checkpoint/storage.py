"""Read and write the training state of a checkpoint with torch.distributed.checkpoint.

Only tensors are stored, each as the bytes of its numbers. The index is JSON (checkpoint/index.py), in the
place of torch's pickle, which could run code.
"""

from __future__ import annotations

import ctypes
import errno
import io
import itertools
import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import blake3
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from forge.checkpoint.index import (
    INDEX,
    ITEM_BYTES,
    Dtype,
    Index,
    StoredPart,
    StoredTensor,
    index_bytes,
)
from forge.checkpoint.manifest import StoredFile
from forge.checkpoint.plan_pickles import read_only_plans
from forge.checkpoint.save_plan import KeptPlan, KeptPlans, named_tensors
from forge.core import failpoints
from forge.core.errors import DataError, DiskFull, ForgeError, UnfitError
from forge.core.file_list import FileList, VerifiedFile
from forge.core.files import disk_trouble
from forge.hosts.network import available_cores
from forge.launch.process_group import World, named
from forge.launch.torch_private import (
    StateDictStager,
    StorageInfo,
    foreach_norm,
    narrow_tensor_by_index,
    split_by_size_and_type,
)

# Two to four files at once are as fast as raw write + fsync, on local disks and network file systems;
# more threads than cores are slower.
WRITER_THREADS = 4
WRITE_OUT_BYTES = 16 * 2**20
DTYPES: dict[Dtype, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
FULL_MIB = 16  # with less than this free, a failed write is reported as a full disk


def training_state(
    model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, dict[str, Any]]:
    """Weights and optimizer state, by parameter name; no two optimizers share a parameter. All ranks call
    it; with FSDP2 the tensors are sharded.

    Nothing else needs saving: learning rate and order of samples are pure functions of the step,
    dropout is one of (seed, step, rank).
    """
    optimizer_state: Any = get_optimizer_state_dict(model, optimizers)["state"]
    return {"model": dict(get_model_state_dict(model)), "optimizer": dict(optimizer_state)}


def state_bytes(state: dict[str, Any], *, local: bool = False) -> int:
    """Size of all tensors of a state. local: of sharded tensors only this rank's part."""
    return sum(
        tensor.numel() * tensor.element_size()
        for tensor in (
            t.to_local() if local and isinstance(t, DTensor) else t for t in _tensors(state)
        )
    )


def _tensors(state: dict[str, Any]) -> Iterator[torch.Tensor]:
    return (tensor for _, tensor in named_tensors(state))


def is_finite(state: dict[str, Any]) -> bool:
    """Return whether every number that this rank holds is finite; one pass, without a copy.

    A NaN or infinity shows in the norms, which take two calls for all tensors: with one call for each
    tensor the writer thread would wait for the GIL each time.
    """
    all_parts = (t.to_local() if isinstance(t, DTensor) else t for t in _tensors(state))
    parts = [part for part in all_parts if part.numel()]
    if not parts:
        return True
    norms = foreach_norm(parts)
    if len({(norm.device, norm.dtype) for norm in norms}) > 1:
        norms = tuple(norm.cpu().float() for norm in norms)
    if bool(torch.stack(norms).isfinite().all()):
        return True
    # The norm of large finite numbers overflows as well.
    return all(bool(torch.isfinite(end)) for part in parts for end in torch.aminmax(part))


def with_joined_scalars(
    state: dict[str, Any],
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """The state with its scalars, such as the step that AdamW keeps of each parameter, as elements of one
    tensor for each type; and these tensors, to be kept until the state is copied.

    torch's stager pins no memory below five bytes. For a copy into memory that is not pinned the host
    waits, and with it for all copies that were launched before.
    """
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in _tensors(state):
        if _is_scalar(tensor):
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
    joined = {dtype: torch.stack(scalars) for dtype, scalars in by_dtype.items()}
    elements = {dtype: iter(tensor) for dtype, tensor in joined.items()}

    def replaced(values: dict[str, Any]) -> dict[str, Any]:
        new: dict[str, Any] = {}
        for name, value in values.items():
            if isinstance(value, dict):
                new[name] = replaced(value)
            else:
                new[name] = next(elements[value.dtype]) if _is_scalar(value) else value
        return new

    return replaced(state), list(joined.values())


def _is_scalar(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 0 and not isinstance(tensor, DTensor)


class Stager:
    """Copies states of one model into host memory, which is kept for the next copy.

    From a GPU into pinned memory on a stream of its own, while the next step computes. torch's
    DefaultStager does the same, but that of torch 2.11 cannot be used twice.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied = torch.cuda.Event() if self._stream else None
        self._copier = StateDictStager(pin_memory=self._stream is not None, share_memory=False)
        self._joined: list[torch.Tensor] = []  # scalars of the state that is being copied

    def stage(self, state: dict[str, Any]) -> dict[str, Any]:
        """A copy of the state, valid until the next call; complete after `wait`. What changes the state
        is to be launched after `hold_device`."""
        if self._stream is None or self._copied is None:
            return self._copy(state)
        state, self._joined = with_joined_scalars(state)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            copy = self._copy(state)
            self._copied.record()
        return copy

    def _copy(self, state: dict[str, Any]) -> dict[str, Any]:
        copy: dict[str, Any] = self._copier.stage(state, non_blocking=self._stream is not None)
        return copy

    def hold_device(self) -> None:
        """Let what is launched next on this device begin after the copy. The host does not wait."""
        if self._copied:
            torch.cuda.current_stream().wait_event(self._copied)

    def wait(self) -> None:
        """Wait on the host until the copy is complete."""
        if self._copied:
            self._copied.synchronize()


def write_state(
    state: dict[str, Any], folder: Path, world: World, plans: KeptPlans
) -> dict[str, StoredFile]:
    """Write the state into a directory, durably; size and digest of each file, by name.

    plans: has the plan of the last save of this kind, and keeps that of this one. All ranks call it; its
    collectives run on world.control. Raises UnfitError on every rank when one cannot write.
    """
    threads = max(1, min(WRITER_THREADS, available_cores() // world.rank.local_world_size))
    planner = plans.planner(state, world, threads)
    writer = TensorWriter(folder, threads, planner.kept)
    read_only_plans()
    try:
        with named("write of the checkpoint"):
            group = world.control
            dcp.save(state, storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as err:  # a BaseException: no `except Exception` would see it
        raise _write_error(err, folder) from None
    plans.keep(planner, writer.results, writer.index)
    failpoints.reach("save.written", folder)
    parts = world.gather_objects(writer.fs.files, dict[str, StoredFile], "gather of digests")
    return {name: facts for part in parts for name, facts in part.items()}


class DigestingFiles(FileSystem):
    """Files of one save: each is digested while it is written, and durable once it is closed."""

    def __init__(self) -> None:
        self.files: dict[str, StoredFile] = {}  # by name

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """DCP's hook; `TensorWriter` calls it, for tensors from several threads."""
        path = Path(path)
        with open(path, mode) as file:
            with DigestingStream(file, path) as stream:
                yield stream
            failpoints.reach("save.sync", path)
            os.fsync(file.fileno())
        size = path.stat().st_size
        self.files[path.name] = StoredFile(bytes=size, digest=stream.digest())


class DigestingStream(io.RawIOBase):
    """Writes to an open file, digests the data, and starts its write-out to the disk early.

    Closing the stream leaves the file open, for the caller's fsync. The digest is taken of the data
    in memory, so that verification finds any error of the write itself.
    """

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self.file, self.path = file, path
        self._hasher = blake3.blake3()
        self._end = 0  # bytes written
        self._begun = 0  # of these, bytes whose write-out was started

    def write(self, data: Any) -> int:
        failpoints.reach("save.write", self.path)
        self._hasher.update(data)
        written = self.file.write(data)
        self._end += written
        if self._end - self._begun >= WRITE_OUT_BYTES:
            self.file.flush()
            _begin_write_out(self.file.fileno(), self._begun, self._end)
            self._begun = self._end
        return written

    def tell(self) -> int:
        return self._end

    def flush(self) -> None:
        self.file.flush()

    def digest(self) -> str:
        """blake3 of all data written, as 64 hex digits."""
        return str(self._hasher.hexdigest())


def _begin_write_out(fd: int, start: int, end: int) -> None:
    """Have the kernel write these bytes to the disk now, so that little is left for fsync.

    Linux starts the write-out of a range when told that it is not needed (mm/fadvise.c).
    """
    with suppress(AttributeError, OSError):  # only a hint, and not on every system
        os.posix_fadvise(fd, start, end - start, os.POSIX_FADV_DONTNEED)


class TensorWriter(FileSystemWriter):
    """DCP's writer with files that hold only the bytes of tensors, one tensor after another.

    torch.save adds a header to each tensor and takes the GIL a dozen times for it: the writer thread
    and training would wait for each other.
    """

    fs: DigestingFiles

    def __init__(self, folder: Path, threads: int, kept: KeptPlan | None = None) -> None:
        """kept: the plan by which this save is made, with the index that it has."""
        super().__init__(folder, thread_count=threads, sync_files=False)
        self.fs = DigestingFiles()
        self.results: list[WriteResult] = []  # of this rank
        self.index = b""  # where this rank has written it
        self._kept = kept

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """DCP's hook: write the index, on one rank. Raises OSError."""
        self.index = self._kept.index if self._kept else _index_of(metadata, results)
        with self.fs.create_stream(Path(self.path) / INDEX, "wb") as stream:
            stream.write(self.index)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """DCP's hook: write this rank's share of the tensors. Raises OSError."""

        prefix = Path(plan.storage_data.prefix).name  # from another rank: it names no directory

        def write(number: int, items: list[WriteItem]) -> list[WriteResult]:
            return self._write_file(f"{prefix}{number}.distcp", items, planner)

        shares = filter(None, split_by_size_and_type(self.thread_count, plan.items))
        with ThreadPoolExecutor(self.thread_count) as pool:
            parts = list(pool.map(write, itertools.count(), shares))
        self.results = [result for part in parts for result in part]
        # The index of a kept plan has them: rank 0 need not read them again.
        assert self._kept is None or self.results == self._kept.results
        written: Future[list[WriteResult]] = Future()
        written.set_result([] if self._kept else self.results)
        return written

    def _write_file(
        self, name: str, items: list[WriteItem], planner: SavePlanner
    ) -> list[WriteResult]:
        results = []
        with self.fs.create_stream(Path(self.path) / name, "wb") as stream:
            for item in items:
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, torch.Tensor)
                if tensor.device.type != "cpu" or not tensor.is_contiguous():
                    tensor = tensor.cpu().contiguous()
                start = stream.tell()
                length = stream.write(bytes_of(tensor))
                where = StorageInfo(name, start, length)
                results.append(WriteResult(item.index, length, where))
            end = stream.tell()
        stored = self.fs.files[name].bytes
        if stored != end:  # truncated by another process
            raise OSError(f"{name} has {stored} bytes, {end} were written")
        return results


def _index_of(metadata: Metadata, results: list[list[WriteResult]]) -> bytes:
    """The content of index.json for what all ranks have written."""
    places = {result.index: result.storage_data for part in results for result in part}
    tensors = {}
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        chunks = sorted(entry.chunks, key=lambda chunk: chunk.offsets)
        parts = [_part(chunk, places[MetadataIndex(name, chunk.offsets)]) for chunk in chunks]
        tensors[name] = StoredTensor(NAMES[entry.properties.dtype], list(entry.size), parts)
    return index_bytes(tensors)


def _part(chunk: ChunkStorageMetadata, place: StorageInfo) -> StoredPart:
    shape = list(chunk.sizes)
    return StoredPart(list(chunk.offsets), shape, place.relative_path, place.offset, place.length)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A writable view of the memory of a contiguous CPU tensor; the caller keeps the tensor alive."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    view = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(view).cast("B")


def _write_error(err: CheckpointException, folder: Path) -> ForgeError:
    """The error for a save that failed on some rank."""
    causes = sorted({f"rank {rank}: {failure[0]}" for rank, failure in err.failures.items()})
    what = f"cannot write checkpoint {folder}: {'; '.join(causes)}"
    numbers = {getattr(failure[0], "errno", None) for failure in err.failures.values()}
    # torch's file writer reports a full disk as an "unexpected pos".
    with suppress(OSError):
        free_mib = shutil.disk_usage(folder).free / 2**20
        if numbers & {errno.ENOSPC, errno.EDQUOT} or free_mib < FULL_MIB:
            return DiskFull(
                what,
                cause=f"no space left on the device: {free_mib:.1f} MiB are free",
                fix="free space and rerun the same command; the last checkpoint is intact",
            )
    return UnfitError(
        what,
        cause="the disk is read-only or failing",
        fix="rerun the same command, or choose another directory for `results`; the last"
        " checkpoint is intact",
    )


def load_state(
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    folder: Path,
    world: World,
) -> None:
    """Load a checkpoint of any world size into model and optimizers; without optimizers, the weights
    alone. All ranks call it.

    Raises as `read_tensors` does.
    """
    state: dict[str, dict[str, Any]] = {"model": dict(get_model_state_dict(model))}
    if optimizers:
        state = training_state(model, optimizers)
    group = world.with_own_group().control
    what = "load of the checkpoint"
    read_only_plans()

    def read() -> None:
        with named(what):
            read_tensors(state, folder, process_group=group)

    world.patiently(read, what)
    set_model_state_dict(model, state["model"])
    if not optimizers:
        return
    groups = get_optimizer_state_dict(model, optimizers)["param_groups"]
    set_optimizer_state_dict(
        model, optimizers, optim_state_dict={"state": state["optimizer"], "param_groups": groups}
    )


def read_tensors(
    state: dict[str, Any], folder: Path, files: FileList | None = None, **dcp_options: Any
) -> None:
    """Fill the tensors of `state` in place from a checkpoint directory.

    files: of the checkpoint, with their digests: each file of which a tensor is read is read once, as a
    whole, and the digest is that of the very bytes that the tensors get. Without it digests are not
    looked at. Raises DataError when names, shapes or files do not fit, UnfitError when the disk reports
    an error.
    """
    reader = SafeReader(folder, files)
    try:
        with warnings.catch_warnings():
            # Loading in a single process is intended.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(state, storage_reader=reader, **dcp_options)
    except CheckpointException as err:
        if reader.index_error:
            raise reader.index_error from None
        failures = [failure[0] for failure in err.failures.values()]
        for failure in failures:
            if isinstance(failure, ForgeError):  # of another rank
                raise failure from None
            if isinstance(failure, OSError):
                with suppress(OSError), disk_trouble(folder, "read"):
                    raise failure from None
        reasons = sorted({repr(failure) for failure in failures})
        raise DataError(
            f"cannot load checkpoint {folder}: {'; '.join(reasons)}",
            cause="it was made by another model, or a file is corrupt",
            fix=f"check it: forge validate {folder}",
        ) from None


class SafeReader(FileSystemReader):
    """DCP's reader for the files of TensorWriter. Reads the index without running code from it.

    files: as for `read_tensors`. index_error: why the index could not be read. DCP of torch 2.11 drops
    errors of `read_metadata`.
    """

    index_error: ForgeError | None = None

    def __init__(self, folder: Path, files: FileList | None = None) -> None:
        super().__init__(folder)
        self._files = files

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """DCP's hook. Raises DataError, UnfitError."""
        path = Path(self.path) / INDEX
        try:
            if self._files:
                index = Index.parse(self._files.read(INDEX, Index.MAX_BYTES), path)
            else:
                index = Index.read(path)
        except ForgeError as err:
            self.index_error = err
            raise
        return Metadata(
            state_dict_metadata={name: _entry(tensor) for name, tensor in index.tensors.items()},
            storage_data={
                MetadataIndex(name, part.offset): StorageInfo(part.file, part.start, part.bytes)
                for name, tensor in index.tensors.items()
                for part in tensor.parts
            },
            storage_meta=StorageMeta(load_id=self.load_id),
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._tensors = metadata.state_dict_metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """DCP's hook: read what this rank needs. Raises OSError, and EOFError for a truncated file."""
        path = Path(self.path)
        failpoints.reach("load.read", path)

        def where(item: ReadItem) -> tuple[str, int]:
            info = self.storage_data[item.storage_index]
            return info.relative_path, info.offset

        for name, items in itertools.groupby(sorted(plan.items, key=where), lambda i: where(i)[0]):
            with self._files.verified(name) if self._files else open(path / name, "rb") as file:
                for item in items:
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(self._read(file, item))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, file: IO[bytes] | VerifiedFile, item: ReadItem) -> torch.Tensor:
        """The requested part of a stored tensor. Where that is whole rows, only these rows are read."""
        kept = self._tensors[item.storage_index.fqn]
        assert isinstance(kept, TensorStorageMetadata)
        sizes = next(c.sizes for c in kept.chunks if c.offsets == item.storage_index.offset)
        info = self.storage_data[item.storage_index]
        start, shape = info.offset, list(sizes)
        offsets, lengths = list(item.storage_offsets), list(item.lengths)
        if shape and lengths[1:] == shape[1:]:
            start += info.length // shape[0] * offsets[0] if shape[0] else 0
            shape[0], offsets[0] = lengths[0], 0
        tensor = torch.empty(shape, dtype=kept.properties.dtype)
        file.seek(start)
        if file.readinto(bytes_of(tensor)) != tensor.nbytes:  # type: ignore[union-attr]
            raise EOFError(f"{info.relative_path} ends before {item.storage_index.fqn} does")
        return narrow_tensor_by_index(tensor, offsets, lengths)


def _entry(tensor: StoredTensor) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(part.offset), torch.Size(part.shape))
        for part in tensor.parts
    ]
    properties = TensorProperties(dtype=DTYPES[tensor.dtype])
    return TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)


def weights_digest(model: torch.nn.Module) -> str | None:
    """blake3 over names, types, shapes and bytes of all weights on rank 0; None on other ranks.

    The same for every sharding. All ranks call it, since sharded weights are gathered one by one.
    """
    main = not dist.is_initialized() or dist.get_rank() == 0
    hasher = blake3.blake3()
    weights: dict[str, Any] = get_model_state_dict(model)
    for name, tensor in sorted(weights.items()):
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if main:
            update_digest(hasher, name, full)
    return hasher.hexdigest() if main else None


def update_digest(hasher: Any, name: str, tensor: torch.Tensor) -> None:
    """Add one named tensor to a weights digest."""
    hasher.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
    hasher.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
