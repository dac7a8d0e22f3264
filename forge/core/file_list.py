"""Lists of files with sizes and digests: describe, check sizes, verify digests, find extra files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import blake3

from forge.core.errors import DataError
from forge.core.files import READ_BYTES, digest_file, disk_trouble, is_file_below, open_regular

THREADS = 4  # files that one reader digests at once


class FileEntry(NamedTuple):
    """Size in bytes and blake3 of a file; the size is None where the list has none."""

    size: int | None
    digest: str


@dataclass(frozen=True)
class FileList:
    """Files by their path below a directory; "" is the directory itself, where it is a file.

    listed_in: what has sizes and digests, for messages. fix: what to do about a bad file. follow_links:
    whether a file may be elsewhere; a directory that comes from elsewhere could have links to any file.
    """

    folder: Path
    entries: Mapping[str, FileEntry]
    listed_in: str = "the manifest"
    fix: str = ""
    follow_links: bool = False

    def check_sizes(self) -> None:
        """DataError for the first file that is missing or truncated; no file is read."""
        for name in self.entries:
            self.check(name, content=False)

    def check(self, name: str, *, content: bool = True) -> None:
        """DataError for a missing, truncated or changed file, UnfitError where the disk reports an error.
        content: whether to read the file for its digest."""
        if what := self._problem(name, content):
            raise DataError(f"{_path(self.folder, name)} {what[0]}", cause=what[1], fix=self.fix)

    @contextmanager
    def verified(self, name: str, most: int | None = None) -> Iterator[VerifiedFile]:
        """A file to be read once, in order. The digest is that of the bytes which the caller gets, not of
        those which were there a moment before: they count once the block has ended.

        most: as for `open_regular`. Raises as `check`, for a digest at the end of the block.
        """
        if name not in self.entries:
            raise DataError(f"{_path(self.folder, name)} is not in {self.listed_in}", fix=self.fix)
        self.check(name, content=False)
        path = _path(self.folder, name)
        with disk_trouble(path, "read"), open_regular(path, most) as file:
            reader = VerifiedFile(file)
            yield reader
            actual = reader.digest()
        if actual != self.entries[name].digest:
            what, cause = self._changed(name, actual)
            raise DataError(f"{path} {what}", cause=cause, fix=self.fix)

    def read(self, name: str, most: int | None = None) -> bytes:
        """The content of a file, whose digest was verified. most: as for `open_regular`. Raises as
        `check`."""
        with self.verified(name, most) as file:
            return file.read()

    def bad_files(self, share: tuple[int, int] = (0, 1), *, content: bool = True) -> Iterator[str]:
        """A sentence for each missing, truncated or changed file, sorted by name. share: as for `verify`.
        content: whether to read files for their digests. Raises UnfitError where the disk reports an
        error, which says nothing about the content."""
        names = sorted(self.entries)[share[0] :: share[1]]
        with ThreadPoolExecutor(THREADS) as pool:
            problems = pool.map(lambda name: self._problem(name, content), names)
            for name, what in zip(names, problems, strict=True):
                if what:
                    yield f"{name or self.folder.name} {what[0]}"

    def extra(self, there: Iterable[str]) -> Iterator[str]:
        """A sentence for each name that is there and not in the list."""
        for name in sorted(set(there) - set(self.entries)):
            yield f"{name or self.folder.name} is not in {self.listed_in}"

    def _problem(self, name: str, content: bool) -> tuple[str, str] | None:
        """Trouble with a file, without its name, and the likely cause."""
        path, expected = _path(self.folder, name), self.entries[name]
        below = self.folder if name else self.folder.parent
        with disk_trouble(path, "read"):
            if not (path.is_file() if self.follow_links else is_file_below(path, below)):
                if path.is_file():
                    return (
                        "is a link out of its directory",
                        "made by hand, or it came from elsewhere",
                    )
                what = "is not a regular file" if path.exists() else "is missing"
                return what, "removed or replaced, or an interrupted copy"
            if expected.size not in (None, size := path.stat().st_size):
                what = f"has {size} bytes, {self.listed_in} says {expected.size}"
                return what, "an interrupted copy, a full disk, or an edit"
            if content and (actual := digest_file(path)) != expected.digest:
                return self._changed(name, actual)
        return None

    def _changed(self, name: str, actual: str) -> tuple[str, str]:
        wanted = self.entries[name].digest
        what = f"has digest {actual[:12]}, {self.listed_in} says {wanted[:12]}"
        return what, "its content has changed: a disk or copy error, or an edit"


class VerifiedFile:
    """An open file that is read forward, and the digest of all bytes on the way."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._hasher, self._place = file, blake3.blake3(), 0

    def seek(self, place: int) -> None:
        """Read on to this place. Raises EOFError for an earlier one."""
        if place < self._place:
            raise EOFError(f"{self._file.name} is read at byte {place} after byte {self._place}")
        while self._place < place and self._next(min(READ_BYTES, place - self._place)):
            pass

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer; the number of bytes, fewer at the end of the file."""
        size: int = self._file.readinto(buffer)  # type: ignore[attr-defined]
        self._hasher.update(memoryview(buffer)[:size])
        self._place += size
        return size

    def read(self) -> bytes:
        """The rest of the file."""
        return b"".join(iter(lambda: self._next(READ_BYTES), b""))

    def digest(self) -> str:
        """blake3 of the whole file, whose rest is read."""
        while self._next(READ_BYTES):
            pass
        return self._hasher.hexdigest()

    def _next(self, size: int) -> bytes:
        data = self._file.read(size)
        self._hasher.update(data)
        self._place += len(data)
        return data


def verify(lists: Iterable[FileList], share: tuple[int, int] = (0, 1)) -> None:
    """Verify digests of the files in several lists. share: (i, n) verifies every n-th file from the i-th
    on, for n readers. Raises for the first bad file as `FileList.check`."""
    files = [(listed, name) for listed in lists for name in sorted(listed.entries)]
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda file: file[0].check(file[1]), files[share[0] :: share[1]]))


def described(
    folder: Path, names: Iterable[str], *, sync: bool = False
) -> Iterator[tuple[str, int, str]]:
    """Name, size in bytes and blake3 of files below a directory, in this order. sync: make each durable
    first. Raises FileNotFoundError, and UnfitError where the disk reports an error."""

    def describe(name: str) -> tuple[str, int, str]:
        path = _path(folder, name)
        with disk_trouble(path, "read"), open(path, "rb") as file:
            if sync:
                os.fsync(file.fileno())
            return name, os.fstat(file.fileno()).st_size, digest_file(path)

    with ThreadPoolExecutor(THREADS) as pool:
        yield from pool.map(describe, names)


def _path(folder: Path, name: str) -> Path:
    return folder / name if name else folder
