"""The bytes of an input file: decompressed, and counted and digested as they are read."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blake3

from forge.core.files import update_from_file
from forge.data.formats import is_compressed

CHUNK_BYTES = 2**20

Consumed = Callable[[int], None]


@dataclass(frozen=True)
class BytesRead:
    """Receives the bytes that are read from one file.

    consumed: called with their number, for progress. hasher: updated with them, so that a file which is
    digested is read once.
    """

    consumed: Consumed
    hasher: blake3.blake3 | None

    def add(self, data: bytes | memoryview) -> None:
        self.consumed(len(data))
        if self.hasher:
            self.hasher.update(data)

    def digest(self, path: Path) -> None:
        """Digest a file that a library reads in its own order. Raises OSError."""
        if self.hasher:
            update_from_file(self.hasher, path)


class _ReportedFile(io.FileIO):
    """A file that reports what is read from it, also below a decompressor."""

    def __init__(self, path: Path, read: BytesRead) -> None:
        super().__init__(path, "rb")
        self._read = read

    def readinto(self, buffer: Any) -> int | None:
        length = super().readinto(buffer)
        self._read.add(memoryview(buffer)[:length])
        return length


@contextmanager
def open_bytes(path: Path, read: BytesRead) -> Iterator[io.BufferedReader[Any]]:
    """The bytes of a file, decompressed where its name ends in .gz, .zst or .zstd, in any case.

    Raises EOFError for an empty compressed file, and what the libraries raise for a corrupt one.
    """
    if is_compressed(path.name) and not path.stat().st_size:
        raise EOFError("it is empty")  # the libraries would read it as a file without text
    with io.BufferedReader(_ReportedFile(path, read), CHUNK_BYTES) as raw:
        if path.suffix.lower() == ".gz":
            with gzip.GzipFile(fileobj=raw) as unpacked:
                yield io.BufferedReader(unpacked, CHUNK_BYTES)
        elif is_compressed(path.name):
            # zstandard's stream reader does not detect a truncated file; pyarrow's does.
            import pyarrow

            yield io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"), CHUNK_BYTES)
        else:
            yield raw
        while raw.read(CHUNK_BYTES):  # what a decompressor leaves is a part of the digest, too
            pass
