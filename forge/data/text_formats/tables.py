"""Documents of CSV and TSV: one column."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from typing import IO

from forge.core.errors import DataError
from forge.data import decoding
from forge.data.decoding import Utf8, check_length, no_text, offset_from
from forge.data.input_bytes import TextInput
from forge.data.not_text import require_plain

SEPARATORS = {"csv": ",", "tsv": "\t"}


def documents(file: TextInput) -> Iterator[str]:
    """The texts in one column of CSV or TSV as RFC 4180 and spreadsheets have it: the first row has the
    names of the columns; a cell in double quotes may have separators, line breaks and doubled quotes.

    Raises DataError for a row with another number of cells, and for wrong quotes.
    """
    with file.open() as stream:
        yield from _cells(_lines(stream, file.utf8), file)


def _cells(lines: Iterator[str], file: TextInput) -> Iterator[str]:
    """The cells of the column of the text."""
    csv.field_size_limit(decoding.MAX_DOCUMENT_BYTES)
    rows = csv.reader(lines, delimiter=SEPARATORS[file.kind], strict=True)
    header, column, first = list[str](), 0, 1
    try:
        for row in rows:
            if row and not header:
                header, column = row, _column(row, file.settings.text_field, file.location)
            elif row and len(row) != len(header):
                raise DataError(
                    f"{file.location}, line {first}: a row of {len(row)} cells; the first row names"
                    f" {len(header)} columns",
                    cause="a cell with separators or line breaks that is not in double quotes",
                    fix="write the file again with a library for tables, or as JSONL",
                )
            elif row:  # else an empty line
                yield row[column]
            first = rows.line_num + 1
    except csv.Error as err:
        raise DataError(
            f"{file.location}, line {first}: {err}",
            cause="a double quote inside of a cell that is not doubled, or one that is missing",
            fix="write the file again with a library for tables, or as JSONL",
        ) from None


def _lines(stream: IO[bytes], utf8: Utf8) -> Iterator[str]:
    start = number = 0
    while line := stream.readline(decoding.MAX_DOCUMENT_BYTES + 1):
        number += 1
        check_length(len(line), f"{utf8.path} has at line {number} a line", "correct the file")
        require_plain(line, utf8.path, start)
        text, _ = utf8.decode(line, offset_from(start))
        yield text.removeprefix("\ufeff") if start == 0 else text
        start += len(line)


def _column(names: list[str], field: str, path: str) -> int:
    """The number of the column that holds the text."""
    if names.count(field) == 1:
        return names.index(field)
    problem = f"exists {names.count(field)} times" if field in names else "is missing"
    if len(names) == 1 and (other := re.search(r"[;\t|]", names[0])):
        problem += (
            f" (its first line has {other[0]!r}; columns are separated by commas, in .tsv by tabs)"
        )
    raise no_text(path, field, problem, names)
