"""Lists of files with sizes and digests: describe, check sizes, verify digests, find extra files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from forge.core.errors import DataError
from forge.core.files import digest_file, disk_trouble, is_file_below

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
                what = f"has digest {actual[:12]}, {self.listed_in} says {expected.digest[:12]}"
                return what, "its content has changed: a disk or copy error, or an edit"
        return None


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
