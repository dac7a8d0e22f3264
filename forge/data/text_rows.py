"""Documents of files with rows: one field of JSONL, one column of CSV, TSV and parquet."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import orjson

from forge.core.errors import DataError
from forge.core.tokenize_settings import Tokenize
from forge.data import decoding
from forge.data.decoding import Utf8, check_length, corrupt, offset_from
from forge.data.input_bytes import Consumed
from forge.data.not_text import HEAD_BYTES, require_plain, require_text
from forge.data.parquet_pages import rows_per_batch

SEPARATORS = {"csv": ",", "tsv": "\t"}
MOST_SHOWN = 200  # characters of the names of columns, in an error

# --- JSONL ----------------------------------------------------------------------------------------


def jsonl(stream: IO[bytes], settings: Tokenize, utf8: Utf8) -> Iterator[str]:
    """The texts of JSONL."""
    start = number = 0
    while line := stream.readline(decoding.MAX_DOCUMENT_BYTES + 1):
        number += 1
        document = _well_formed(line, settings.text_field)
        if document is None:
            yield from _json_line(line, number, start, settings.text_field, utf8)
        else:
            yield document
        start += len(line)


def _well_formed(line: bytes, field: str) -> str | None:
    """The text of a line, by a parser that is twice as fast as json's and stricter.

    None for a line that `_json_line` must judge: it knows the policy and words all errors.
    """
    try:
        record = orjson.loads(line) if len(line) <= decoding.MAX_DOCUMENT_BYTES else None
    except ValueError:
        return None
    text = record.get(field) if isinstance(record, dict) else None
    return text if isinstance(text, str) else None


def _json_line(line: bytes, number: int, start: int, field: str, utf8: Utf8) -> Iterator[str]:
    """The document of a line, if it is not blank. start: the position of the line in the file."""
    place = f"line {number}"
    check_length(len(line), f"{utf8.path} has at {place} a line", "write one object per line")
    text, _ = utf8.decode(line, offset_from(start))
    if number == 1:
        text = text.removeprefix("\ufeff")
    if not text.isspace():
        yield _json_document(text, place, field, utf8)


def _json_document(line: str, place: str, field: str, utf8: Utf8) -> str:
    where = f"{utf8.path}, {place}"
    try:
        record = json.loads(line.rstrip())  # of a cut line the newline would be said to be wrong
    except (ValueError, RecursionError) as err:  # ValueError: also numbers of over 4300 digits
        raise DataError(
            f"{where} is not JSON: {err}: {line.strip()[:60]!r}",
            cause="truncated, or indented JSON; each line must be one complete object",
            fix="correct the line, or set tokenize.format if the file is not JSONL",
        ) from None
    if not isinstance(record, dict):
        raise DataError(
            f"{where} is not an object: {line.strip()[:60]!r}",
            fix=f'each line must look like {{"{field}": "…"}}',
        )
    if field not in record:
        raise _no_text(where, field, "is missing", list(record))
    text = record[field]
    if not isinstance(text, str):
        raise _no_text(where, field, f"is {type(text).__name__}, not a string", list(record))
    return _without_surrogates(text, place, utf8)


def _without_surrogates(text: str, place: str, utf8: Utf8) -> str:
    r"""Applies the policy for invalid bytes to a lone surrogate, which JSON can spell ("\ud83d")."""
    try:
        text.encode()
    except UnicodeEncodeError as err:
        utf8.invalid(f"has a lone surrogate \\u{ord(text[err.start]):x} at {place}")
        return re.sub("[\ud800-\udfff]", "\ufffd", text)
    return text


def _no_text(where: str, field: str, problem: str, fields: list[str]) -> DataError:
    found = ", ".join(fields)[:MOST_SHOWN] or "none"
    return DataError(
        f"{where}: field {field!r} {problem}; fields found: {found}",
        fix="set tokenize.text_field to the field that holds the text, or correct the file",
    )


# --- CSV and TSV ----------------------------------------------------------------------------------


def table(stream: IO[bytes], separator: str, settings: Tokenize, utf8: Utf8) -> Iterator[str]:
    """The texts in one column of CSV or TSV as RFC 4180 and spreadsheets have it: the first row has the
    names of the columns; a cell in double quotes may have separators, line breaks and doubled quotes.

    Raises DataError for a row with another number of cells, and for wrong quotes.
    """
    csv.field_size_limit(decoding.MAX_DOCUMENT_BYTES)
    rows = csv.reader(_lines(stream, utf8), delimiter=separator, strict=True)
    header, column, first = list[str](), 0, 1
    try:
        for row in rows:
            if row and not header:
                header, column = row, _column(row, settings.text_field, utf8.path)
            elif row and len(row) != len(header):
                raise DataError(
                    f"{utf8.path}, line {first}: a row of {len(row)} cells; the first row names"
                    f" {len(header)} columns",
                    cause="a cell with separators or line breaks that is not in double quotes",
                    fix="write the file again with a library for tables, or as JSONL",
                )
            elif row:  # else an empty line
                yield row[column]
            first = rows.line_num + 1
    except csv.Error as err:
        raise DataError(
            f"{utf8.path}, line {first}: {err}",
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
    raise _no_text(path, field, problem, names)


# --- parquet --------------------------------------------------------------------------------------


def parquet(
    path: Path, size: int, settings: Tokenize, utf8: Utf8, consumed: Consumed
) -> Iterator[str]:
    """The texts of a parquet file. size: its bytes, for progress."""
    import pyarrow
    import pyarrow.parquet

    with path.open("rb") as begin:
        head = begin.read(HEAD_BYTES)
    if not head.startswith(b"PAR1"):
        require_text(head, utf8.path)
    field, row = settings.text_field, 0
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            _check_column(table.schema_arrow, utf8.path, field)
            num_rows = max(table.metadata.num_rows, 1)
            rows = rows_per_batch(path, table.metadata, field)
            for batch in table.iter_batches(rows, columns=[field], use_threads=False):
                # As bytes: pyarrow does not check that a string column is UTF-8.
                for value in batch.column(0).cast("large_string").cast("large_binary"):
                    row += 1
                    yield _parquet_document(value.as_py(), f"row {row}", field, utf8)
                consumed(size * row // num_rows - size * (row - len(batch)) // num_rows)
    except (pyarrow.lib.ArrowException, ValueError) as err:
        raise corrupt(utf8.path, err) from None


def _check_column(schema: Any, path: str, field: str) -> None:
    import pyarrow

    count = schema.names.count(field)
    if count != 1:
        problem = "is missing" if count == 0 else f"exists {count} times"
        raise _no_text(path, field, problem, schema.names)
    kind = schema.field(field).type
    if isinstance(kind, pyarrow.DictionaryType):
        kind = kind.value_type
    if str(kind) not in ("string", "large_string", "string_view"):
        raise _no_text(path, field, f"is {kind}, not a string", schema.names)


def _parquet_document(data: bytes | None, place: str, field: str, utf8: Utf8) -> str:
    where = f"{utf8.path}, {place}"
    if data is None:
        raise _no_text(where, field, "is null, not a string", [field])
    check_length(len(data), f"{where} has a text", "write one document per row")
    return utf8.decode(data, lambda index: f"{place}, byte {index} of its text")[0]
