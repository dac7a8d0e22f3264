"""Number of rows of a parquet column that can be decoded at once in bounded memory.

A few bytes may decode to gigabytes: a page that compresses well, or rows that share one long value of
a dictionary. So the header of each page is read first. It says what the page decompresses to, and
pyarrow allocates just that. The value of a row lies in its page, or in the dictionary page.
iter_batches alone takes 4.1 GiB for 256 rows of a file of 126 kB, or 20 times as long row by row.
Format: https://github.com/apache/parquet-format (PageHeader), in Thrift's compact protocol.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from forge.core.errors import DataError

# What a batch may decode to, as the largest document. Ordinary pages have 1 to 3 MiB, that of the
# dictionary, too: 64 rows fit, and without threads, which one column does not need, they are read as
# fast as 1024.
BATCH_BYTES = 2**28
BATCH_ROWS = (256, 128, 64, 32, 16, 8, 4, 2, 1)
MAX_PAGE_BYTES = 2**30
# The longer ones for a header with statistics in it; pyarrow reads none that is longer still.
HEADER_BYTES = (2**8, 2**14, 2**24)
DICTIONARY = 2  # PageType
# Kinds of fields in the compact protocol; FIXED: the length of their values.
INTEGERS, BINARY, STRUCT = (4, 5, 6), 8, 12
FIXED = {1: 0, 2: 0, 3: 1, 7: 8}
MOST_NESTED = 4


class Page(NamedTuple):
    kind: int  # PageType
    num_bytes: int  # decompressed
    rows: int


def rows_per_batch(path: Path, metadata: Any, column: str) -> int:
    """Number of rows of a text column to decode at once, at most 256.

    metadata: of pyarrow's ParquetFile. Raises DataError for a page of more than MAX_PAGE_BYTES,
    ValueError for one without a valid header, and OSError.
    """
    fewest = BATCH_ROWS[0]
    with open(path, "rb") as file:
        for group in range(metadata.num_row_groups):
            row_group = metadata.row_group(group)
            chunks = (row_group.column(index) for index in range(row_group.num_columns))
            chunk = next((each for each in chunks if each.path_in_schema == column), None)
            if chunk is None:
                raise ValueError(f"row group {group} has no column {column}")
            pages = list(_pages(file.fileno(), chunk))
            _check_pages(path, pages)
            fitting = (n for n in BATCH_ROWS if _most_bytes(pages, n) <= BATCH_BYTES)
            fewest = min(fewest, next(fitting, 1))
    return fewest


def _check_pages(path: Path, pages: list[Page]) -> None:
    largest = max((page.num_bytes for page in pages), default=0)
    if largest > MAX_PAGE_BYTES:
        raise DataError(
            f"{path} has a page of {largest / 2**20:.0f} MiB, at most {MAX_PAGE_BYTES // 2**20} are read",
            cause="a page is held in memory as a whole; common are pages of 1 MiB",
            fix="write the file again with smaller pages (data_page_size), or leave it out",
        )


def _most_bytes(pages: list[Page], rows: int) -> int:
    """The most that this many consecutive rows can decode to."""
    entry = max((page.num_bytes for page in pages if page.kind == DICTIONARY), default=0)
    data = [page for page in pages if page.kind != DICTIONARY]
    most = 0
    for first, page in enumerate(data):
        taken, total = 1, page.num_bytes  # from the last row of this page on
        for following in data[first + 1 : first + rows]:
            if taken >= rows:
                break
            taken, total = taken + following.rows, total + following.num_bytes
        most = max(most, total)
    return most + rows * entry


def _pages(file: int, chunk: Any) -> Iterator[Page]:
    """The pages of a column of a row group, from their headers."""
    start, first = chunk.data_page_offset, chunk.dictionary_page_offset
    at = first if chunk.has_dictionary_page and first and first < start else start
    end = at + chunk.total_compressed_size
    rows = 0
    while at < end and rows < chunk.num_values:
        header, length = _header(file, at)
        # 5: data_page_header, 8: data_page_header_v2, both with num_values first
        values = header.get(5) or header.get(8) or {1: 0}
        count = values.get(1) if isinstance(values, dict) else None
        numbers: list[Any] = [*(header.get(field) for field in (1, 2, 3)), count]
        if not all(isinstance(number, int) and number >= 0 for number in numbers):
            raise ValueError(f"no valid page header at byte {at}")
        kind, unpacked, packed, count = numbers
        page = Page(kind, unpacked, count)
        yield page
        at, rows = at + length + packed, rows + page.rows


def _header(file: int, at: int) -> tuple[dict[int, Any], int]:
    """The fields of a page header by number, and its length."""
    for size in HEADER_BYTES:
        try:
            return _struct(os.pread(file, size, at), 0, MOST_NESTED)
        except IndexError:
            continue
    raise ValueError(f"no page header at byte {at}")


def _struct(data: bytes, at: int, nested: int) -> tuple[dict[int, Any], int]:
    """A struct of the compact protocol, and where it ends. IndexError where the data ends before."""
    fields: dict[int, Any] = {}
    number = 0
    while head := data[at]:
        delta, kind, at = head >> 4, head & 15, at + 1
        number, at = (number + delta, at) if delta else _integer(data, at)
        if kind in INTEGERS:
            fields[number], at = _integer(data, at)
        elif kind in FIXED:
            at += FIXED[kind]
        elif kind == BINARY:
            length, at = _varint(data, at)
            at += length
        elif kind == STRUCT and nested:
            fields[number], at = _struct(data, at, nested - 1)
        else:
            raise ValueError(f"a page header with a field of kind {kind}")
    return fields, at + 1


def _integer(data: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at  # zigzag


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while data[at] & 0x80:
        value, shift, at = value | (data[at] & 0x7F) << shift, shift + 7, at + 1
        if shift > 63:
            raise ValueError("a page header with a number of more than 64 bits")
    return value | data[at] << shift, at + 1
