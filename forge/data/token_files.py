"""Token ids that other programs have written (tokenize.format nanogpt, megatron, dolma), as documents.

- nanogpt: `.bin`, ids and nothing else (data/openwebtext/prepare.py of nanoGPT)
- megatron: `.bin` with ids, and `.idx` with their dtype and where sequences and documents begin
  (megatron/core/datasets/indexed_dataset.py)
- dolma: `.npy` with ids and no header of NumPy, and `.csv.gz` with a row for each document: start and
  end in tokens, then where its text is from (python/dolma/tokenizer/memmap_writer.py)

A file with NumPy's header (np.save) is read by it, other headers are refused (`data.token_headers`).
Whether plain ids are of the dtype that the settings say: `data.token_readings`.
"""

from __future__ import annotations

import csv
import gzip
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forge.core.errors import DataError
from forge.core.files import disk_trouble
from forge.core.text_formats import TOKEN_FORMATS, UNRECORDED_DTYPE
from forge.core.tokenize_settings import Tokenize
from forge.data import token_headers, token_readings
from forge.data.corpus import InputFile
from forge.data.token_readings import PlainIds

COMPRESSIONS = ("gz", "zst", "xz", "bz2", "lz4", "zip")
CHUNK_TOKENS = 2**20
# A document is held in memory. Of more tokens than this, the wrong id was taken for the end of text.
MAX_DOCUMENT_TOKENS = 2**26

# Megatron's index: magic, version, dtype, number of sequences, number of documents + 1.
HEADER = struct.Struct("<9sQBQQ")
MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
MEGATRON_DTYPES = {4: "int32", 5: "int64", 8: "uint16"}

Ids = np.ndarray[Any, np.dtype[Any]]


# --- which files --------------------------------------------------------------------------------


def data_files(files: list[InputFile], settings: Tokenize) -> list[InputFile]:
    """The inputs that hold ids, if tokenize.format is a format of tokens; else all. DataError where no
    input holds ids."""
    if settings.format not in TOKEN_FORMATS:
        return files
    suffix = TOKEN_FORMATS[settings.format].ending
    matching = [file for file in files if file.path.suffix == suffix]
    _refuse_compressed(files, suffix)
    if not matching:
        raise DataError(
            f"{settings.shown_inputs} has no file of ids: of {len(files)} files none ends in {suffix}",
            cause=f"`format` in tokenize is {settings.format}",
            fix=f"name the {suffix} files, or correct `format`",
        )
    return matching


def _refuse_compressed(files: list[InputFile], suffix: str) -> None:
    """DataError for compressed ids: among plain ones they would be left out silently."""
    names = {file.location for file in files}
    for file in files:
        plain, dot, ending = file.location.rpartition(".")
        if dot and ending in COMPRESSIONS and plain.endswith(suffix) and plain not in names:
            raise DataError(
                f"{file.path} has compressed ids, which are not read",
                cause=f"of its directory or glob only {suffix} files are",
                fix="decompress it beside itself, or name the files that shall be read",
            )


def with_index(files: list[InputFile], settings: Tokenize) -> list[InputFile]:
    """The files and their indexes, if the format has any."""
    return [part for file in files for part in (file, *_index(file, settings.format))]


def _index(file: InputFile, kind: str) -> Iterator[InputFile]:
    suffix = TOKEN_FORMATS[kind].beside if kind in TOKEN_FORMATS else ""
    path = file.path.with_suffix(suffix)
    if suffix and path.is_file():
        name = file.name.removesuffix(file.path.suffix) + suffix
        yield InputFile(name, str(path), path.stat().st_size)


# --- documents ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layout:
    """dtype: of the ids in a file. ends: positions after the last tokens of its documents, ascending;
    None: only the end-of-text id tells. start: the byte at which ids begin. is_guess: the dtype is that
    of the settings, and the file does not record it."""

    dtype: np.dtype[Any]
    ends: Ids | None = None
    start: int = 0
    is_guess: bool = False


def read_documents(
    file: InputFile,
    settings: Tokenize,
    *,
    vocab_size: int,
    eos_id: int,
    consumed: Callable[[int], None] = lambda num_bytes: None,
) -> Iterator[Ids]:
    """The ids of each document of a file, in order, without end-of-text id and without empty documents.

    A document ends with an end-of-text id, and where the index says so. Holds a document, a chunk and 8
    bytes for each document of an index. consumed: called with the number of bytes read since its last
    call. DataError for an id beyond the vocabulary, a corrupt index, and a file without an end.
    """
    with disk_trouble(file.path, "read"):
        layout = _layout(file, settings)
        other = _OtherReadings(layout, PlainIds(file.path, file.size, vocab_size, eos_id))
        _check_size(file, layout, other)
        other.refuse()
        chunks = _chunks(file, layout, other, consumed)
        has_end, start, held = layout.ends is not None, 0, list[Ids]()
        for ids in chunks:
            cuts = _cuts(ids, start, eos_id, layout.ends)
            begin = 0
            for end in cuts.tolist():
                held.append(ids[begin:end])
                yield from _document(held, eos_id)
                begin, held = end, []
            held.append(ids[begin:])
            has_end, start = has_end or len(cuts) > 0, start + len(ids)
            _check_length(file, sum(map(len, held)), other)
        if start and not has_end:
            raise _no_end(file, f"has {start} tokens, and none is", other)
        yield from _document(held, eos_id)


def _document(parts: list[Ids], eos_id: int) -> Iterator[Ids]:
    ids = np.concatenate(parts) if len(parts) > 1 else parts[0] if parts else np.empty(0)
    if len(ids) and ids[-1] == eos_id:
        ids = ids[:-1]
    if len(ids):
        yield ids


def _cuts(ids: Ids, start: int, eos_id: int, ends: Ids | None) -> Ids:
    """Positions at which documents end in a chunk whose first token has position `start` in its file."""
    cuts = np.flatnonzero(ids == eos_id) + 1
    if ends is None:
        return cuts
    first, last = ends.searchsorted([start, start + len(ids)], side="right")
    return np.union1d(cuts, ends[first:last] - start)


def _chunks(
    file: InputFile, layout: _Layout, other: _OtherReadings, consumed: Callable[[int], None]
) -> Iterator[Ids]:
    """The ids of a file as uint32, checked."""
    start = 0
    with open(file.path, "rb") as stream:
        stream.seek(layout.start)
        while len(ids := np.fromfile(stream, layout.dtype, CHUNK_TOKENS)):
            wrong = (ids < 0) | (ids >= other.ids.vocab_size)
            if wrong.any():
                at = int(wrong.argmax())
                raise DataError(
                    f"{file.path}: token {start + at} is id {ids[at]}, and the tokenizer has"
                    f" {other.ids.vocab_size} ids",
                    cause=f"made with another tokenizer, or not of {layout.dtype.name}",
                    fix=other.fix("correct tokenizer.source"),
                )
            consumed(ids.nbytes)
            start += len(ids)
            yield ids.astype(np.uint32)


def _check_length(file: InputFile, num_tokens: int, other: _OtherReadings) -> None:
    if num_tokens > MAX_DOCUMENT_TOKENS:
        what = f"has a document of more than {MAX_DOCUMENT_TOKENS} tokens without"
        raise _no_end(file, what, other)


def _no_end(file: InputFile, what: str, other: _OtherReadings) -> DataError:
    return DataError(
        f"{file.path} {what} id {other.ids.eos_id}, which ends a document",
        cause="another token ends its documents, or none does",
        fix=other.fix(
            "set tokenizer.eos_token to the token that ends a document in these files", ""
        ),
    )


@dataclass(frozen=True)
class _OtherReadings:
    """Other readings of the bytes of a file, where settings say the dtype and nothing in the file."""

    layout: _Layout
    ids: PlainIds

    def refuse(self) -> None:
        """DataError where another dtype fits better, by `PlainIds.refuse_other`."""
        if self.layout.is_guess and self.ids.size:
            self.ids.refuse_other(self.layout.dtype, has_index=self.layout.ends is not None)

    def fix(self, fix: str, or_dtype: str = ", or correct `token_dtype` in tokenize") -> str:
        """The fix of an error, or what to set for the readings that fit the file. or_dtype: added where
        none fits."""
        if not self.layout.is_guess:
            return fix
        ends = self.layout.ends
        found = self.ids.others(None if ends is None else int(ends[-1:].sum()))
        found = [dtype for dtype in found if dtype != self.layout.dtype]
        return token_readings.how_to_read(found, self.ids.path) if found else fix + or_dtype


def refuse_other_readings(
    files: list[InputFile], settings: Tokenize, *, vocab_size: int, eos_id: int
) -> None:
    """DataError for the first file whose ids are rather of another dtype than tokenize.token_dtype: an
    earlier version of Forge has read it all the same. Reads the beginning of each file."""
    if settings.format not in UNRECORDED_DTYPE:
        return
    for file in files:
        with disk_trouble(file.path, "read"):
            has_index = next(_index(file, settings.format), None) is not None
            layout = _by_header(file, settings, np.empty(0) if has_index else None)
            _OtherReadings(layout, PlainIds(file.path, file.size, vocab_size, eos_id)).refuse()


def warning(files: list[InputFile], settings: Tokenize, vocab_size: int) -> str | None:
    """A warning where 16 bits cannot hold all ids of the tokenizer; by the first file."""
    if settings.format not in UNRECORDED_DTYPE or vocab_size <= 2**16 or not files:
        return None
    with disk_trouble(files[0].path, "read"):
        dtype = _by_header(files[0], settings, None).dtype
    if dtype.itemsize > 2:
        return None
    return (
        f"warning: {files[0].path} has ids of 16 bits, and the tokenizer has {vocab_size}: a program that"
        " wrote larger ones wrapped them to others, which cannot be seen in the file"
    )


# --- layouts ------------------------------------------------------------------------------------


def _layout(file: InputFile, settings: Tokenize) -> _Layout:
    if settings.format == "megatron":
        return _of_megatron(file)
    index = next(_index(file, settings.format), None)
    return _by_header(file, settings, _ends_of_dolma(index.path) if index else None)


def _by_header(file: InputFile, settings: Tokenize, ends: Ids | None) -> _Layout:
    if token_headers.refuse_header(file.path, file.size):
        dtype, start = token_headers.numpy_header(file.path, file.size)
        return _Layout(dtype, ends, start)
    return _Layout(np.dtype(settings.token_dtype).newbyteorder("<"), ends, is_guess=True)


def _check_size(file: InputFile, layout: _Layout, other: _OtherReadings) -> None:
    num_tokens, rest = divmod(file.size - layout.start, layout.dtype.itemsize)
    if rest:
        raise DataError(
            f"{file.path} has {file.size} bytes, no multiple of {layout.dtype.itemsize}",
            cause=f"an interrupted copy, or ids of another dtype than {layout.dtype.name}",
            fix=other.fix("copy it again"),
        )
    if layout.ends is None:
        return
    last = int(layout.ends[-1]) if len(layout.ends) else 0
    if last != num_tokens:
        raise DataError(
            f"{file.path} has {num_tokens} tokens, the documents of its index end at {last}",
            cause="an interrupted copy, the index of another file, or ids of another dtype than"
            f" {layout.dtype.name}",
            fix=other.fix("copy both files again"),
        )


def _of_megatron(file: InputFile) -> _Layout:
    """By the index: lengths of sequences (int32) and where they begin in bytes (int64), then the first
    sequence of each document and the number of sequences (int64)."""
    path = file.path.with_suffix(".idx")
    if not path.is_file():
        raise DataError(
            f"{file.path} has no index {path.name}",
            cause="files of Megatron-LM come in pairs; tokenize.format is megatron",
            fix="put the .idx file beside it, or correct tokenize.format",
        )
    with open(path, "rb") as stream:
        head = stream.read(HEADER.size)
        if len(head) < HEADER.size or head[:9] != MAGIC:
            raise _bad_index(path, f"begins with {head[:9]!r}, not with {MAGIC!r}")
        _, version, code, sequences, documents = HEADER.unpack(head)
        if version != VERSION or code not in MEGATRON_DTYPES:
            raise _bad_index(path, f"has version {version} and dtype code {code}")
        if path.stat().st_size < HEADER.size + 12 * sequences + 8 * documents:
            raise _bad_index(path, f"is too short for {sequences} sequences, {documents} documents")
        lengths = np.fromfile(stream, "<i4", sequences)
        pointers = np.fromfile(stream, "<i8", sequences)
        firsts = np.fromfile(stream, "<i8", documents)
    dtype = np.dtype(MEGATRON_DTYPES[code]).newbyteorder("<")
    ends = np.append(0, np.cumsum(lengths, dtype=np.int64))  # after no, one, … sequences
    apart = (lengths < 0) | (pointers != ends[:-1] * dtype.itemsize)
    if apart.any():
        at = int(apart.argmax())
        raise _bad_index(
            path,
            f"has sequence {at} with {lengths[at]} tokens from byte {pointers[at]} on; the one before it"
            f" ends at byte {ends[at] * dtype.itemsize}",
        )
    wrong = np.diff(firsts, prepend=0, append=sequences) < 0
    if wrong.any():
        at = min(int(wrong.argmax()), documents - 1)
        raise _bad_index(
            path,
            f"has document {at} from sequence {firsts[at]} on: documents must be in order, within"
            f" {sequences} sequences",
        )
    return _Layout(dtype, ends[firsts])


def _ends_of_dolma(path: Path) -> Ids:
    try:
        with gzip.open(path, "rt", newline="") as rows:
            return np.fromiter(_ends(path, csv.reader(rows)), np.int64)
    except (ValueError, IndexError, EOFError, gzip.BadGzipFile) as err:
        raise _bad_index(path, f"cannot be read: {err}") from None


def _ends(path: Path, rows: Iterable[list[str]]) -> Iterator[int]:
    """The second column. Each document must begin where the document before it ends: MemmapWriter leaves
    nothing out, and tokens between two would become part of a document."""
    before = 0
    for number, row in enumerate(rows, start=1):
        start, end = int(row[0]), int(row[1])
        if start != before or end < start:
            raise _bad_index(
                path,
                f"has in row {number} a document from token {start} to {end}; the one before it ends at"
                f" {before}",
            )
        yield end
        before = end


def _bad_index(path: Path, what: str) -> DataError:
    return DataError(
        f"{path} {what}",
        cause="an interrupted copy, or the index of another format",
        fix="copy it again, or correct `format` in tokenize",
    )
