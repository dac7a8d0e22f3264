"""Documents of WET files, in which Common Crawl has the text of web pages: `NAME.warc.wet.gz`.

A WARC file (ISO 28500) is a series of records: a line with the version, lines of `Name: value`, an empty
line, a block of as many bytes as `Content-Length` says, and two line ends. The text of a page is the
block of a record of the type `conversion`; a record of the type `warcinfo` is about the file. Each record
is a member of gzip by itself: a file that was cut just between two is a valid one, and cannot be told.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import IO

from forge.core.errors import DataError
from forge.data.decoding import check_length, offset_from
from forge.data.input_bytes import TextInput

VERSION = re.compile(rb"WARC/[0-9.]+\r?\n")
LINE_ENDS = (b"\r\n", b"\n")
MOST_LINE_BYTES = 2**16
MOST_LINES = 1000
TEXT, ABOUT = "conversion", "warcinfo"  # types of records


def documents(file: TextInput) -> Iterator[str]:
    """The text of each page. Raises DataError with the position of a record that is cut or damaged, or of
    another type, as those of WARC and WAT files are."""
    with file.open() as stream:
        start, number = 0, 0
        while line := stream.readline(MOST_LINE_BYTES):
            number += 1
            place = f"{file.location}, record {number} (byte offset {start} of its text)"
            header, length = _header(stream, line, place)
            block, ends = _block(stream, header, place)
            if header["warc-type"] == TEXT:
                yield file.utf8.decode(block, offset_from(start + length))[0]
            start += length + len(block) + ends


def _header(stream: IO[bytes], line: bytes, place: str) -> tuple[dict[str, str], int]:
    """The values of a record by name in lower case, and the bytes that they take. line: its first."""
    if not VERSION.fullmatch(line):
        raise _damaged(place, f"begins with {line[:40]!r}, not with WARC/1.0")
    values: dict[str, str] = {}
    length = len(line)
    for _ in range(MOST_LINES):
        line = stream.readline(MOST_LINE_BYTES)
        length += len(line)
        if line in LINE_ENDS:
            break
        name, colon, value = line.decode("utf-8", "replace").partition(":")
        if not line.endswith(b"\n") or not colon:
            raise _damaged(place, f"has the line {line[:40]!r} in its header")
        values[name.strip().lower()] = value.strip()
    else:
        raise _damaged(place, f"has a header of more than {MOST_LINES} lines")
    kind, num_bytes = values.get("warc-type"), values.get("content-length", "")
    if not re.fullmatch("[0-9]{1,18}", num_bytes):
        raise _damaged(place, f"has Content-Length {num_bytes!r}")
    if kind not in (TEXT, ABOUT):
        raise DataError(
            f"{place} is of the type {kind}, and has no text",
            cause="a WARC or WAT file of the same crawl, in place of its WET file",
            fix="take the files whose names end in .warc.wet.gz",
        )
    return values, length


def _block(stream: IO[bytes], header: dict[str, str], place: str) -> tuple[bytes, int]:
    """The block of a record, and the bytes of the two line ends behind it."""
    wanted = int(header["content-length"])
    check_length(wanted, f"{place} is a text", "remove the record")
    block = stream.read(wanted)
    ends = [stream.readline(MOST_LINE_BYTES) for _ in range(2)]
    if len(block) < wanted or not {*ends} <= {*LINE_ENDS}:
        page = header.get("warc-target-uri", "")
        raise _damaged(
            place, f"has {wanted} bytes by its Content-Length, and no end behind them: {page:.100}"
        )
    return block, sum(map(len, ends))


def _damaged(place: str, what: str) -> DataError:
    return DataError(
        f"{place} {what}",
        cause="an interrupted download, or a file of another kind",
        fix="fetch the file again",
    )
