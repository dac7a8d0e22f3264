"""Text from the bytes of an input file: the policy for what is not UTF-8, and the limit of a document."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from typing import IO

from forge.core.errors import DataError
from forge.data.not_text import require_plain

CHUNK_BYTES = 2**20  # read at a time
MAX_DOCUMENT_BYTES = 2**28
MOST_SHOWN = 200  # characters of the names of columns, in an error

Warn = Callable[[str], None]


class Utf8:
    """Bytes to text by the policy `tokenize.invalid_utf8`, for one file."""

    def __init__(self, path: str, policy: str, warn: Warn) -> None:
        self.path, self._policy, self._warn = path, policy, warn
        self._warned = False

    def decode(
        self, data: bytes, position: Callable[[int], str], final: bool = True
    ) -> tuple[str, int]:
        """The text and the number of bytes decoded; an incomplete last character is left if not final.

        position(i): the position of byte i of data, for messages.
        """
        try:
            return codecs.utf_8_decode(data, "strict", final)
        except UnicodeDecodeError as err:
            text, used = codecs.utf_8_decode(data, "replace", final)
            what = f"is not UTF-8 at {position(err.start)} (0x{data[err.start]:02x})"
            self.invalid(what, is_rare=text.count("\ufffd") * 4 <= len(text))
            return text, used

    def invalid(self, what: str, is_rare: bool = True) -> None:
        """Raise DataError or, with the policy `replace`, warn the first time. is_rare: of a binary file
        U+FFFD would be all that is left."""
        if self._policy == "error":
            replace = ", or set tokenize.invalid_utf8: replace" if is_rare else ""
            raise DataError(
                f"{self.path} {what}",
                cause="another encoding (Latin-1, UTF-16), or a binary file among the inputs",
                fix="convert the file to UTF-8, leave it out of tokenize.inputs" + replace,
            )
        if not self._warned:
            self._warned = True
            self._warn(f"{self.path} {what}: replaced by U+FFFD, here and in the rest of the file")

    def stream(self, stream: IO[bytes]) -> Iterator[str]:
        """The text of a stream in pieces of about CHUNK_BYTES, without a byte order mark."""
        start, rest = 0, b""  # rest: the incomplete character at the end of a chunk
        while True:
            chunk = stream.read(CHUNK_BYTES)
            require_plain(chunk, self.path, start + len(rest))
            text, used = self.decode(rest + chunk, offset_from(start), final=not chunk)
            yield text.removeprefix("\ufeff") if start == 0 else text
            if not chunk:
                return
            start, rest = start + used, (rest + chunk)[used:]


def offset_from(start: int) -> Callable[[int], str]:
    return lambda index: f"byte offset {start + index}"


def check_length(length: int, what: str, fix: str) -> None:
    if length > MAX_DOCUMENT_BYTES:
        raise DataError(
            f"{what} of more than {MAX_DOCUMENT_BYTES // 2**20} MiB",
            cause="a document is held in memory as a whole",
            fix=fix,
        )


def corrupt(path: str, err: Exception) -> DataError:
    return DataError(
        f"{path} is corrupt: {err}",
        cause="an interrupted download or copy, or a wrong file name extension",
        fix="fetch the file again",
    )


def no_text(where: str, field: str, problem: str, fields: list[str]) -> DataError:
    """The error for a row without a text. field: tokenize.text_field. fields: those that it has."""
    found = ", ".join(fields)[:MOST_SHOWN] or "none"
    return DataError(
        f"{where}: field {field!r} {problem}; fields found: {found}",
        fix="set tokenize.text_field to the field that holds the text, or correct the file",
    )
