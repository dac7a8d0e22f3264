"""Documents of text: the file, or its parts between tokenize.document_separator."""

from __future__ import annotations

import os
from collections.abc import Iterator

from forge.core.files import utf8_bytes
from forge.core.text_formats import is_compressed
from forge.data.decoding import CHUNK_BYTES, check_length, offset_from
from forge.data.input_bytes import TextInput
from forge.data.not_text import require_plain, require_text


def documents(file: TextInput) -> Iterator[str]:
    """The documents of text."""
    if file.size <= CHUNK_BYTES and not is_compressed(file.name):
        yield from _of_small_file(file)
        return
    with file.open() as stream:
        pieces = file.utf8.stream(stream)
        yield from _split_text(pieces, file.settings.document_separator, file.location)


def _of_small_file(file: TextInput) -> Iterator[str]:
    """The documents of a small file, read at once: for thousands of them, each call counts."""
    data = _read_at_once(file)
    file.add(data)
    require_text(data, file.location)
    require_plain(data, file.location, 0)
    text, separator = file.utf8.decode(data, offset_from(0))[0], file.settings.document_separator
    text = text.removeprefix("\ufeff")
    yield from text.split(separator) if separator else [text]


def _read_at_once(file: TextInput) -> bytes:
    """The bytes of a small file, by three system calls; `open` and `read` of Python make eight."""
    descriptor = os.open(file.location, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.read(descriptor, file.size + 1)
        if len(data) != file.size:  # it has changed since it was listed
            while more := os.read(descriptor, CHUNK_BYTES):
                data += more
        return data
    finally:
        os.close(descriptor)


def _split_text(pieces: Iterator[str], separator: str | None, path: str) -> Iterator[str]:
    """The text of all pieces, split at each separator; one document without one."""
    held = ""
    held_bytes = 0
    for piece in pieces:
        # Only new text can complete a separator: a long document is not searched again.
        searched = max(0, len(held) - len(separator or "") + 1)
        held += piece
        held_bytes += utf8_bytes(piece)
        if separator and held.find(separator, searched) >= 0:
            *complete, held = held.split(separator)
            held_bytes = utf8_bytes(held)
            yield from complete
        check_length(
            held_bytes,
            f"{path} has a document",
            "split the text into documents: set tokenize.document_separator",
        )
    yield held
