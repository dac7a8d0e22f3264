"""The part of `forge stage` that runs on one node: inspect, copy or unpack, verify, keep, remove.

Everything is in a private directory, `forge-{uid}`:

- `{digest}`: a set of files to keep (`stage.keep`), or staged outside of Slurm: token shards, or the
  inputs of a program
- `job-{id}/{digest}`: a set that is removed at the end of the job; `job-{id}/used-by-{run}` marks each
  run that reads it
- `job-{id}/writing-…` and `.writing-{digest}`: incomplete copies, sent by another host or made by
  this one
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from forge.core.errors import DataError, UnfitError
from forge.core.files import (
    digest_file,
    disk_trouble,
    private_root,
    relative_path,
)
from forge.core.paths import MANIFEST
from forge.core.process import node_local_folder
from forge.core.terminal import progress
from forge.data.copy_stamp import CopyStamp
from forge.data.inputs import InputSet
from forge.data.shards import FileSet, Kind, Member
from forge.data.sources import open_tokens
from forge.hosts.network import interface_towards

SPARE_BYTES = 256 * 2**20  # left free for other users of the node
CHUNKS = (
    "chunks"  # directory of the chunks of an archive, inside the directory they are unpacked into
)
COPY_THREADS = 4
COPY_BLOCK = 2**22
FICLONE = 0x40049409  # <linux/fs.h>
LOCK_POLL_SEC = 0.2

# A node reads in place from a shared file system that is at least this fast. A rank reads some KiB for
# each sample, in random order: 1000 reads a second are five times what four fast GPUs need. Every
# start verifies the digests of all shards: 200 s for 100 GiB at this rate, shared by all nodes that read
# them there.
MIN_READS_PER_SEC = 1000
MIN_MIB_PER_SEC = 500
SAMPLE_READS, SAMPLE_READ_BYTES = 64, 2**14
SAMPLE_BYTES = 64 * 2**20


# --- sets of files --------------------------------------------------------------------------------


def open_shared(kind: Kind, folder: Path) -> FileSet:
    """The set whose manifest is in this directory of the shared file system. Raises DataError."""
    return InputSet.open(folder) if kind == "inputs" else open_tokens(folder)


def open_copy(kind: Kind, folder: Path) -> FileSet:
    """The copy of a set in a directory of this node. Raises DataError."""
    return InputSet.open_copy(folder) if kind == "inputs" else open_tokens(folder)


# --- directories----------------------------------------------------------------------------------


def set_folder(root: Path, digest: str, job: str | None) -> Path:
    """The directory of a set. job: the Slurm job with which it is removed; None to keep it."""
    return (root / f"job-{job}" if job else root) / digest[:32]


# --- is a copy complete? -------------------------------------------------------------------------


def is_complete(kind: Kind, folder: Path, digest: str) -> bool:
    """Return whether the directory has this set with valid digests. Raises DataError where it is corrupt.

    Files with a `CopyStamp` are not read again. The first ranks of a job verify their shards once more.
    """
    if not folder.exists():
        return False
    existing = open_copy(kind, folder)
    if existing.digest != digest:
        return False
    stamp = CopyStamp.of(existing)
    if not stamp.is_there:
        existing.verify()
        stamp.write()
    return True


# --- is the shared file system fast enough? -------------------------------------------------------


def shared_verdict(
    kind: Kind, shared: Path, digest: str, root: Path, mode: str, *, goes_away: bool
) -> tuple[bool, str]:
    """Decide whether to read the set in place from the shared file system, and why. goes_away: whether a
    copy would be removed with a job, or shall stay."""
    if mode == "always":
        return False, "stage.mode is always"
    try:
        files = open_shared(kind, shared)
    except (DataError, UnfitError, OSError) as err:
        return False, f"cannot read the {kind} there ({err})"
    if files.digest != digest:
        return False, f"{shared} has {kind} with another digest on this node"
    stays = "" if goes_away else "outside of a Slurm job nothing would remove a copy"
    if why := "stage.mode is never" if mode == "never" else stays:
        return True, why
    if {member.path.stat().st_dev for member in files.members} == {root.stat().st_dev}:
        return True, f"{root} is on the same file system"
    reads, rate = _measure(files.members)
    enough = reads >= MIN_READS_PER_SEC and rate >= MIN_MIB_PER_SEC
    return enough, (
        f"the shared file system gives {reads:.0f} random reads/s and {rate:.0f} MiB/s,"
        f" required are {MIN_READS_PER_SEC} and {MIN_MIB_PER_SEC}"
    )


def _measure(files: list[Member]) -> tuple[float, float]:
    """Random reads per second, and MiB per second of a sequential read, without the page cache."""
    rng = random.Random(0)
    sample = [_random_read(rng.choice(files), rng) for _ in range(SAMPLE_READS)]
    reads = SAMPLE_READS / _seconds(sample)
    largest = max(files, key=lambda file: file.num_bytes)
    length = min(largest.num_bytes, SAMPLE_BYTES)
    return reads, length / 2**20 / _seconds([(largest.path, 0, length)])


def _random_read(file: Member, rng: random.Random) -> tuple[Path, int, int]:
    offset = rng.randrange(max(1, file.num_bytes - SAMPLE_READ_BYTES))
    return file.path, offset, SAMPLE_READ_BYTES


def _seconds(reads: list[tuple[Path, int, int]]) -> float:
    """Duration of these reads: path, offset, length."""
    seconds = 0.0
    for path, offset, length in reads:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)
            started = time.perf_counter()
            os.pread(fd, length, offset)
            seconds += time.perf_counter() - started
        finally:
            os.close(fd)
    return max(seconds, 1e-6)


# --- calls ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageAnswer:
    """Facts about a node that `forge stage` must know."""

    root: str  # its private directory
    folder: str  # of the copy
    complete: bool  # whether the copy is
    problem: str  # why it is corrupt; "" where it is not
    in_place: bool  # whether to read from the shared file system
    why: str  # that is so, or is not
    free: int  # bytes
    link_mbit: int  # speed of its interface to the sender; 0 where it is not known
    jobs: list[str]  # that have left directories there


def look(
    *,
    base: str | None,
    kind: Kind,
    digest: str,
    job: str | None,
    sender: str | None,
    shared: str,
    mode: str,
    goes_away: bool,
) -> StageAnswer:
    """The state of this node.

    base: stage.folder. job: with which the copy is removed; None to keep it. sender: the host that
    would send it; None where nothing is sent. shared: the directory of the set on the shared file
    system. mode: stage.mode. goes_away: as for `shared_verdict`.
    """
    root = private_root(Path(base or node_local_folder()))
    folder = set_folder(root, digest, job)
    problem = ""
    try:
        complete = is_complete(kind, folder, digest)
    except DataError as err:
        complete, problem = False, err.what
    in_place, why = shared_verdict(kind, Path(shared), digest, root, mode, goes_away=goes_away)
    return StageAnswer(
        root=str(root),
        folder=str(folder),
        complete=complete,
        problem=problem,
        in_place=in_place,
        why=why,
        free=shutil.disk_usage(root).free,
        link_mbit=link_mbit(sender) if sender else 0,
        jobs=sorted(path.name.removeprefix("job-") for path in root.glob("job-*")),
    )


def link_mbit(host: str) -> int:
    """Speed of this node's interface to a host; 0 where the kernel does not know it."""
    stats = psutil.net_if_stats().get(interface_towards(host) or "")
    return stats.speed if stats else 0


def copy(*, kind: Kind, shared: str, folder: str, digest: str, wait_sec: float) -> bool:
    """Copy the set from the shared file system to `folder`; False where another run of this host has done
    so meanwhile. Raises DataError for a corrupt set, UnfitError where that run takes longer than
    wait_sec."""
    target, source = Path(folder), open_shared(kind, Path(shared))
    with _alone(target.parent, wait_sec):
        if _came_meanwhile(kind, target, digest):
            return False
        for leftover in target.parent.glob(".writing-*"):
            shutil.rmtree(leftover)
        temporary = target.with_name(f".writing-{target.name}")
        begin(temporary=str(temporary))
        with disk_trouble(temporary):
            _copy_files(source, temporary)
        try:
            finish(kind=kind, temporary=str(temporary), folder=folder, digest=digest)
        except DataError:
            source.verify()  # names the file that is corrupt there, not its copy
            raise
    return True


@contextlib.contextmanager
def _alone(folder: Path, wait_sec: float) -> Iterator[None]:
    """Wait until no other run of this host copies into the directory: runs of a sweep start at once.

    With flock, which the kernel releases when a process is killed. It suffices for a directory on this
    node's own disk.
    """
    with open(folder / ".lock", "a+") as lock:
        end = time.monotonic() + wait_sec
        while not _is_locked(lock):
            if time.monotonic() > end:
                lock.seek(0)
                raise UnfitError(
                    f"another run has been copying into {folder} for {wait_sec:.0f} s: pid {lock.read()}",
                    cause="its process is stopped, or waits for a file system",
                    fix="end that process (kill -9), or wait for it",
                )
            time.sleep(LOCK_POLL_SEC)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def _is_locked(lock: IO[str]) -> bool:
    """Try to take the lock of the file, and return whether this process has got it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _copy_files(source: FileSet, target: Path) -> None:
    members = source.members
    for folder in {(target / member.name).parent for member in members}:
        folder.mkdir(parents=True, exist_ok=True)
    done = 0
    with (
        progress("stage", source.num_bytes / 2**20, "MiB") as report,
        ThreadPoolExecutor(COPY_THREADS) as pool,
    ):
        copies = pool.map(lambda member: _copy_file(member.path, target / member.name), members)
        for member, _ in zip(members, copies, strict=True):
            done += member.num_bytes
            report(done / 2**20)
    shutil.copyfile(source.folder / MANIFEST, target / MANIFEST)


def _copy_file(source: Path, target: Path) -> None:
    """Make a reflink where the file system supports it, else a copy."""
    with open(source, "rb") as read, open(target, "xb") as write:
        try:
            fcntl.ioctl(write.fileno(), FICLONE, read.fileno())
        except OSError:
            shutil.copyfileobj(read, write, COPY_BLOCK)


def begin(*, temporary: str) -> None:
    """Make an empty directory for incoming files, also where an agent was killed that had made it."""
    folder = Path(temporary)
    with disk_trouble(folder):
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        (folder / CHUNKS).mkdir()


def unpack(*, temporary: str, chunk: str, digest: str) -> None:
    """Unpack one chunk of an archive, and remove it to free its space. DataError where it has another
    digest, and as `_extract`."""
    path = Path(temporary) / CHUNKS / chunk
    with disk_trouble(path):
        if digest_file(path) != digest:
            raise DataError(
                f"{path} is not the chunk that was sent",
                cause="damaged on its way or on this disk, or replaced after it was verified",
                fix="rerun the same command",
            )
        if path.suffix == ".zst":
            import pyarrow

            with (
                pyarrow.input_stream(str(path), compression="zstd") as stream,
                tarfile.open(fileobj=stream, mode="r|") as tar,
            ):
                _extract(tar, path, Path(temporary))
        else:
            with tarfile.open(path) as tar:
                _extract(tar, path, Path(temporary))
        path.unlink()


def _extract(tar: tarfile.TarFile, path: Path, folder: Path) -> None:
    """Write the regular files of an archive. DataError for anything else, and for a place outside.

    As `extractall(filter="data")`, which Python 3.11.2, that of Debian 12, does not have.
    """
    for entry in tar:
        content = tar.extractfile(entry) if entry.isreg() else None
        try:
            target = folder / relative_path(entry.name)
        except ValueError:
            content = None
        if content is None:
            raise DataError(
                f"{path} has {entry.name!r}, which is not a file inside its directory",
                cause="the archive was changed after it was written",
                fix="remove data/archives, and rerun the same command",
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        with content, open(target, "wb") as file:
            shutil.copyfileobj(content, file, COPY_BLOCK)
        # Programs stay executable, and nobody else may write, whatever the mode was.
        target.chmod(entry.mode & 0o755 | 0o600)


def finish(*, kind: Kind, temporary: str, folder: str, digest: str) -> None:
    """Verify every digest, then rename the directory to its final name; an agent that was killed may have
    done part of it. Raises DataError."""
    arrived, target = Path(temporary), Path(folder)
    if not arrived.exists() and _came_meanwhile(kind, target, digest):
        return
    try:
        with contextlib.suppress(FileNotFoundError):
            (arrived / CHUNKS).rmdir()
        files = open_copy(kind, arrived)
        if files.digest != digest:
            raise DataError(f"{arrived} has digest {files.digest[:12]}…, not {digest[:12]}…")
        stamp = CopyStamp.of(files)
        files.verify()
        with disk_trouble(arrived):
            stamp.write()
            if not _came_meanwhile(kind, target, digest):
                shutil.rmtree(target, ignore_errors=True)  # corrupt
                arrived.rename(target)
    finally:
        shutil.rmtree(arrived, ignore_errors=True)


def _came_meanwhile(kind: Kind, target: Path, digest: str) -> bool:
    """Return whether another run has staged this set since this run began."""
    try:
        return is_complete(kind, target, digest)
    except DataError:
        return False


def mark(*, root: str, job: str, run: str) -> None:
    """Record that this run reads what the job has staged on this node."""
    folder = Path(root) / f"job-{job}"
    with disk_trouble(folder):
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / f"used-by-{run}").touch()


def unmark(*, root: str, job: str, run: str) -> None:
    """Undo `mark`; the last run removes what the job has staged."""
    folder = Path(root) / f"job-{job}"
    (folder / f"used-by-{run}").unlink(missing_ok=True)
    if not list(folder.glob("used-by-*")):
        shutil.rmtree(folder, ignore_errors=True)


def forget(*, root: str, names: list[str]) -> int:
    """Remove directories of ended jobs and failed broadcasts; the free bytes after that."""
    for name in names:
        shutil.rmtree(Path(root) / name, ignore_errors=True)
    return shutil.disk_usage(root).free


CALLS: tuple[Callable[..., Any], ...] = (
    *(look, copy, begin, unpack, finish),
    *(mark, unmark, forget),
)
