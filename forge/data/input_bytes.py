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
from forge.core.text_formats import is_compressed
from forge.core.tokenize_settings import Tokenize
from forge.data.decoding import CHUNK_BYTES, Utf8
from forge.data.not_text import HEAD_BYTES, require_plain, require_text

Consumed = Callable[[int], None]


@dataclass(frozen=True)
class TextInput:
    """A file of text, as the reader of its format has it (`data.text_formats`)."""

    name: str
    """Whose ending tells whether the file is compressed; another than that of the location where somebody
    has the file under whatever name."""
    location: str
    """Path of the file on this machine."""
    size: int
    """Bytes on disk."""
    kind: str
    """Name of the format."""
    settings: Tokenize
    utf8: Utf8
    consumed: Consumed
    """Called with the number of bytes that were read from disk, for progress."""
    hasher: blake3.blake3 | None
    """Updated with these bytes, so that a file which is digested is read once."""

    def add(self, data: bytes | memoryview) -> None:
        """Count and digest bytes that were read from disk."""
        self.consumed(len(data))
        if self.hasher:
            self.hasher.update(data)

    def digest(self) -> None:
        """Digest a file that a library reads in its own order. Raises OSError."""
        if self.hasher:
            update_from_file(self.hasher, Path(self.location))

    @contextmanager
    def open(self) -> Iterator[io.BufferedReader[Any]]:
        """The bytes of the file, decompressed where `name` ends in .gz, .zst or .zstd, in any case.

        Raises DataError where they begin as those of no text, EOFError for an empty compressed file, and
        what the libraries raise for a corrupt one.
        """
        with self._opened() as stream:
            head = stream.peek(HEAD_BYTES)[:HEAD_BYTES]
            require_text(head, self.location)
            require_plain(head, self.location, 0)
            yield stream

    @contextmanager
    def _opened(self) -> Iterator[io.BufferedReader[Any]]:
        name = self.name.lower()
        if is_compressed(name) and not Path(self.location).stat().st_size:
            raise EOFError("it is empty")  # the libraries would read it as a file without text
        with io.BufferedReader(_ReportedFile(self), CHUNK_BYTES) as raw:
            if name.endswith(".gz"):
                with gzip.GzipFile(fileobj=raw) as unpacked:
                    yield io.BufferedReader(unpacked, CHUNK_BYTES)
            elif is_compressed(name):
                # zstandard's stream reader does not detect a truncated file; pyarrow's does.
                import pyarrow

                yield io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"), CHUNK_BYTES)
            else:
                yield raw
            while raw.read(CHUNK_BYTES):  # what a decompressor leaves is a part of the digest, too
                pass


class _ReportedFile(io.FileIO):
    """A file that reports what is read from it, also below a decompressor."""

    def __init__(self, file: TextInput) -> None:
        super().__init__(file.location, "rb")
        self._file = file

    def readinto(self, buffer: Any) -> int | None:
        length = super().readinto(buffer)
        self._file.add(memoryview(buffer)[:length])
        return length

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            return self.readall()
        buffer = bytearray(size)
        return bytes(memoryview(buffer)[: self.readinto(buffer)])

    def readall(self) -> bytes:
        """Called by a buffered stream that is read to its end; FileIO's own does not call `readinto`."""
        return b"".join(iter(lambda: self.read(CHUNK_BYTES), b""))
