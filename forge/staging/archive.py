"""Archives for `sbcast`: many files in a few tar files (chunks) of about equal size, written once.

- `{data}/archives/{name}/000.tar`, `001.tar`, … (`.tar.zst` if compressed): every chunk is a complete
  tar file, so that a node unpacks one while the next ones are sent
- of a tree: `000.tar` has all directories and no file, to be unpacked before the other chunks, and
  SHA256SUMS the digests of the chunks
- `archive.json`: the size of every chunk, and of all files in them
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

from forge.core.errors import DataError
from forge.core.files import disk_trouble, plain_name, read_json, write_json
from forge.core.process import hostname
from forge.core.terminal import progress
from forge.data.file_set import Member

# Chunks sent in parallel use every link of the broadcast tree: half the time of one file (see bench).
PARALLEL_CHUNKS = 8
MIN_CHUNK_BYTES = 8 * 2**20  # an sbcast costs about 15 ms by itself
MAX_CHUNK_BYTES = 256 * 2**20  # a larger one would delay the first unpacking
ABANDONED_SEC = 24 * 3600
COPY_BYTES = 2**22
SUMS = "SHA256SUMS"
DIRECTORIES = "000.tar"


@dataclass(frozen=True)
class Archive:
    """A complete archive."""

    folder: Path
    chunks: dict[str, int]  # name -> bytes
    content_bytes: int  # of the files in it

    @property
    def num_bytes(self) -> int:
        return sum(self.chunks.values())

    @classmethod
    def open(cls, folder: Path) -> Archive | None:
        """The archive in a directory; None without one, or where a chunk is truncated or missing."""
        try:
            facts = read_json(folder / "archive.json")
            chunks = {plain_name(name): size for name, size in dict(facts["chunks"]).items()}
            content_bytes = int(facts["content_bytes"])
        except (DataError, KeyError, TypeError, ValueError):
            return None
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
        complete = all(sizes.get(name) == size for name, size in chunks.items())
        return cls(folder, chunks, content_bytes) if complete else None


def make_archive(
    folder: Path, members: Sequence[Member], *, compress: bool = False, tree: bool = False
) -> Archive:
    """Write the archive `folder` of these files, unless it exists.

    compress: zstd, level 1. tree: nodes without Python unpack several chunks at once with tar; adds the
    chunk with the directories, and SHA256SUMS. Links are archived as links in a tree, else as the files
    that they lead to.
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
            if tree:
                _write_sums(temporary)
            sizes = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
            content = sum(member.num_bytes for member in members)
            write_json(temporary / "archive.json", {"chunks": sizes, "content_bytes": content})
            if not Archive.open(folder):
                shutil.rmtree(folder, ignore_errors=True)
                with contextlib.suppress(FileExistsError):
                    temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    archive = Archive.open(folder)
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


def _write_sums(folder: Path) -> None:
    lines = []
    for path in sorted(folder.iterdir()):
        with open(path, "rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n")
    (folder / SUMS).write_text("".join(lines))
