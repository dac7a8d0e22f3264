"""Documents of parquet: one column of text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forge.core.errors import DataError
from forge.core.text_formats import is_compressed
from forge.data.decoding import Utf8, check_length, corrupt, no_text
from forge.data.input_bytes import TextInput
from forge.data.not_text import HEAD_BYTES, require_text
from forge.data.parquet_pages import rows_per_batch


def documents(file: TextInput) -> Iterator[str]:
    """The texts of a parquet file."""
    import pyarrow
    import pyarrow.parquet

    file.digest()
    path, utf8 = Path(file.location), file.utf8
    with path.open("rb") as begin:
        head = begin.read(HEAD_BYTES)
    if not head.startswith(b"PAR1"):
        if is_compressed(file.name):
            raise DataError(
                f"{utf8.path} is compressed parquet",
                cause="parquet is read from its end, and has compressed pages inside",
                fix="decompress it (gunzip, zstd -d), and name the file .parquet",
            )
        require_text(head, utf8.path)
    field, row = file.settings.text_field, 0
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
                before = file.size * (row - len(batch)) // num_rows
                file.consumed(file.size * row // num_rows - before)
    except (pyarrow.lib.ArrowException, ValueError) as err:
        raise corrupt(utf8.path, err) from None


def _check_column(schema: Any, path: str, field: str) -> None:
    import pyarrow

    count = schema.names.count(field)
    if count != 1:
        problem = "is missing" if count == 0 else f"exists {count} times"
        raise no_text(path, field, problem, schema.names)
    kind = schema.field(field).type
    if isinstance(kind, pyarrow.DictionaryType):
        kind = kind.value_type
    if str(kind) not in ("string", "large_string", "string_view"):
        raise no_text(path, field, f"is {kind}, not a string", schema.names)


def _parquet_document(data: bytes | None, place: str, field: str, utf8: Utf8) -> str:
    where = f"{utf8.path}, {place}"
    if data is None:
        raise no_text(where, field, "is null, not a string", [field])
    check_length(len(data), f"{where} has a text", "write one document per row")
    return utf8.decode(data, lambda index: f"{place}, byte {index} of its text")[0]
