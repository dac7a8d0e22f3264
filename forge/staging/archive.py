"""Archives for `sbcast`: many files in a few tar files (chunks) of about equal size, written once.

- `{data}/archives/forge-{uid}/{name}/000.tar`, `001.tar`, … (`.tar.zst` if compressed): every chunk is a
  complete tar file, so that a node unpacks one while the next ones are sent
- of a tree: `000.tar` has all directories and no file, to be unpacked before the other chunks
- `archive.json`: size, digest, inode and ctime of every chunk, and the size of all files in them

What an archive holds runs on nodes, and `data` may be a group's, or a copy of another's. So each user
has a directory for archives, into which nobody else can write, and an archive is reused only where every
chunk is the file that archive.json was written about: an inode and a ctime cannot be chosen beforehand
by somebody whose files were copied or unpacked here. What is sent is verified again where it arrives,
against the digests that this process has read. None of that holds against programs that run as this user.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import tarfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import blake3
import psutil

from forge.core.errors import DataError
from forge.core.files import disk_trouble, read_json, write_json
from forge.core.process import hostname
from forge.core.terminal import progress
from forge.data.shards import Member

# Chunks sent in parallel use every link of the broadcast tree: half the time of one file (see bench).
PARALLEL_CHUNKS = 8
MIN_CHUNK_BYTES = 8 * 2**20  # an sbcast costs about 15 ms by itself
MAX_CHUNK_BYTES = 256 * 2**20  # a larger one would delay the first unpacking
ABANDONED_SEC = 24 * 3600
COPY_BYTES = 2**22
DIRECTORIES = "000.tar"
# sha256 where nodes without Python verify the chunks, with sha256sum.
ALGORITHMS: dict[str, Any] = {"sha256": hashlib.sha256, "blake3": blake3.blake3}


@dataclass(frozen=True)
class Archive:
    """A complete archive."""

    folder: Path
    chunks: dict[str, int]  # name -> bytes
    digests: dict[str, str]  # name -> sha256 of a chunk of a tree, else blake3
    content_bytes: int  # of the files in it

    @property
    def num_bytes(self) -> int:
        return sum(self.chunks.values())

    @property
    def sums(self) -> str:
        """The digests, as `sha256sum --check` reads them."""
        return "\n".join(f"{digest}  {name}" for name, digest in self.digests.items())

    @classmethod
    def open(cls, folder: Path, *, verify: bool = True) -> Archive | None:
        """The archive in a directory; None without one, or where a chunk is missing, corrupt, or another
        file than the file that was written there. verify: read all of it."""
        try:
            facts = read_json(folder / "archive.json")
            states, digests = facts["states"], facts["digests"]
            algorithm, content_bytes = facts["algorithm"], int(facts["content_bytes"])
            same = states == _states(folder)
            same = same and (not verify or digests == _digests(folder, algorithm))
        except (DataError, OSError, KeyError, TypeError, ValueError):
            return None
        sizes = {name: size for name, (size, *_) in states.items()}
        return cls(folder, sizes, digests, content_bytes) if same else None


def make_archive(
    folder: Path, members: Sequence[Member], *, compress: bool = False, tree: bool = False
) -> Archive:
    """Write the archive `folder` of these files, unless it exists.

    folder: in a directory of this user alone. compress: zstd, level 1. tree: nodes without Python unpack
    several chunks at once with tar; adds the chunk with the directories. Links are archived as links in a
    tree, else as the files that they lead to.
    Of runs that write the same archive at once, the first to finish wins. Raises UnfitError for a full
    disk.
    """
    if archive := Archive.open(folder):
        return archive
    temporary = folder.with_name(f".writing.{os.getpid()}.{hostname()}.{folder.name}")
    with disk_trouble(temporary):
        _remove_abandoned(folder.parent)
        temporary.mkdir(parents=True)
        try:
            if tree:
                _write_directories(temporary / DIRECTORIES, members)
            _write_chunks(temporary, members, compress, tree=tree)
            content = sum(member.num_bytes for member in members)
            facts = _facts(temporary, "sha256" if tree else "blake3")
            write_json(temporary / "archive.json", {**facts, "content_bytes": content})
            # Read whole: one whose content has changed without a trace is replaced, too.
            if not Archive.open(folder):
                shutil.rmtree(folder, ignore_errors=True)
                try:
                    temporary.rename(folder)
                except OSError as err:
                    was_first = err.errno in (errno.EEXIST, errno.ENOTEMPTY)  # another run
                    if not was_first:
                        raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    archive = Archive.open(folder, verify=False)
    assert archive, f"{folder} vanished"
    return archive


def _remove_abandoned(parent: Path) -> None:
    """Remove what killed commands have left: those of this host, and of any host a day ago."""
    for folder in parent.glob(".writing.*"):
        pid, host = folder.name.split(".")[2:4]
        dead_here = host == hostname() and not psutil.pid_exists(int(pid))
        if dead_here or time.time() - folder.stat().st_mtime > ABANDONED_SEC:
            shutil.rmtree(folder, ignore_errors=True)


def _write_directories(path: Path, members: Sequence[Member]) -> None:
    """Write every directory above a member. Where two GNU tars make the same one at the same moment, one
    of them fails with "Cannot open: No such file or directory" (1.34, src/extract.c: maybe_recoverable
    gives up where it has not made the directory itself)."""
    above = {parent for member in members for parent in PurePosixPath(member.name).parents}
    with _tar(path, compress=False, dereference=False) as tar:
        for name in sorted(map(str, above - {PurePosixPath()})):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)


def _write_chunks(folder: Path, members: Sequence[Member], compress: bool, *, tree: bool) -> None:
    total = sum(member.num_bytes for member in members)
    size = min(max(total // (2 * PARALLEL_CHUNKS), MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)
    done = 0
    with progress("archive", total / 2**20, "MiB") as report:
        for number, group in enumerate(_groups(members, size), start=int(tree)):
            path = folder / (f"{number:03d}.tar" + ".zst" * compress)
            with _tar(path, compress, dereference=not tree) as tar:
                for member in group:
                    tar.add(member.path, member.name, recursive=False)
            done += sum(member.num_bytes for member in group)
            report(done / 2**20)


def _groups(members: Sequence[Member], size: int) -> Iterator[list[Member]]:
    """Consecutive members, in groups of at least `size` bytes (the last may be smaller)."""
    group: list[Member] = []
    held = 0
    for member in members:
        group.append(member)
        held += member.num_bytes
        if held >= size:
            yield group
            group, held = [], 0
    if group:
        yield group


@contextlib.contextmanager
def _tar(path: Path, compress: bool, *, dereference: bool) -> Iterator[tarfile.TarFile]:
    with contextlib.ExitStack() as stack:
        if compress:
            import pyarrow

            # Level 1, Arrow's default: higher ones save 3 % of token ids and take three times as long.
            stream = stack.enter_context(pyarrow.output_stream(str(path), compression="zstd"))
            tar = stack.enter_context(tarfile.open(fileobj=stream, mode="w|"))
        else:
            tar = stack.enter_context(tarfile.open(path, "x"))
        tar.dereference = dereference
        tar.copybufsize = COPY_BYTES  # type: ignore[attr-defined]  # else 16 KiB
        yield tar


def _facts(folder: Path, algorithm: str) -> dict[str, Any]:
    """Contents of archive.json about the chunks."""
    digests = _digests(folder, algorithm)
    return {"algorithm": algorithm, "digests": digests, "states": _states(folder)}


def _chunks(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name != "archive.json")


def _states(folder: Path) -> dict[str, list[int]]:
    """Size, inode, and ctime in ns of each chunk; the kernel sets ctime at every change."""
    stats = {path.name: path.lstat() for path in _chunks(folder)}
    return {name: [s.st_size, s.st_ino, s.st_ctime_ns] for name, s in stats.items()}


def _digests(folder: Path, algorithm: str) -> dict[str, str]:
    def digest(path: Path) -> str:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, ALGORITHMS[algorithm]).hexdigest()

    paths = _chunks(folder)
    with ThreadPoolExecutor(PARALLEL_CHUNKS) as pool:
        return dict(zip((path.name for path in paths), pool.map(digest, paths), strict=True))
