"""The table of formats. Threats: a format that is in the table and has no reader, cannot be found by its
endings, or reads a cut file as a whole one; endings that the documents do not name."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path

import blake3
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from support.repository import REPOSITORY

from forge.core.config import Config, checked
from forge.core.errors import ConfigError, DataError
from forge.core.files import digest_file
from forge.core.text_formats import FORMATS, TEXT_FORMATS, format_by_name
from forge.core.tokenize_settings import Tokenize
from forge.data import corpus
from forge.data.decoding import CHUNK_BYTES, Utf8
from forge.data.input_bytes import TextInput

TEXTS = ["one, two", "ü 世界 🙂"]


def parquet() -> bytes:
    made = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), made)
    return made.getvalue()


# A file of each format with the documents TEXTS.
WRITTEN: dict[str, Callable[[], bytes]] = {
    "text": lambda: "|".join(TEXTS).encode(),
    "jsonl": lambda: "\n".join(json.dumps({"text": text}) for text in TEXTS).encode(),
    "csv": lambda: "\n".join(["text", *(f'"{text}"' for text in TEXTS)]).encode(),
    "tsv": lambda: "\n".join(["text", *TEXTS]).encode(),
    "parquet": parquet,
}
NAMES = [(name, end) for name, one in TEXT_FORMATS.items() for end in one.endings]


def read(path: Path, kind: str, hasher: blake3.blake3 | None = None) -> list[str]:
    settings = Tokenize(inputs=[str(path)], format=kind, document_separator="|")
    [file] = corpus.list_files(settings)
    return list(corpus.read_documents(file, settings, hasher=hasher))


@pytest.mark.parametrize(("name", "end"), NAMES)
def test_each_format_is_found_by_its_endings_and_read_by_its_name(
    name: str, end: str, tmp_path: Path
) -> None:
    path, other = tmp_path / f"a{end}", tmp_path / "a.other"
    for file in (path, other):
        file.write_bytes(WRITTEN[name]())
    hasher = blake3.blake3()
    assert format_by_name(str(path)) == name
    assert read(path, "auto", hasher) == read(other, name) == TEXTS
    assert hasher.hexdigest() == digest_file(path)


@pytest.mark.parametrize("name", sorted(TEXT_FORMATS.keys() - {"parquet"}))
def test_cut_file_of_each_format_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(WRITTEN[name]())[:-9])
    with pytest.raises(DataError, match=r"a\.gz is corrupt"):
        read(path, name)


def test_no_two_formats_have_one_ending() -> None:
    endings = [end for _, end in NAMES]
    assert len({*endings}) == len(endings)


def test_page_about_data_names_each_format_of_the_table() -> None:
    page = (REPOSITORY / "docs/data.md").read_text()
    assert not [end for name, end in NAMES if name != "text" and f"`{end}`" not in page]
    assert not [name for name in FORMATS.keys() - TEXT_FORMATS.keys() if f"`{name}`" not in page]


def test_unknown_format_is_refused_with_those_of_the_table() -> None:
    with pytest.raises(ConfigError) as refused:
        checked(Config, {"tokenize": {"format": "warc"}}, "config.yaml")
    assert not [name for name in ("auto", *FORMATS) if name not in refused.value.what]


@pytest.mark.parametrize("sizes", [[-1], [None], [10, -1], [10, CHUNK_BYTES + 1, -1]])
def test_file_that_a_library_reads_to_its_end_is_counted_and_digested_whole(
    sizes: list[int | None], tmp_path: Path
) -> None:
    path = tmp_path / "large.xml"
    path.write_bytes(b"<text>" + b"some words " * 300_000)
    hasher, counted = blake3.blake3(), list[int]()
    settings = Tokenize(inputs=[str(path)])
    utf8 = Utf8(str(path), settings.invalid_utf8, print)
    size = path.stat().st_size
    file = TextInput(path.name, str(path), size, "x", settings, utf8, counted.append, hasher)
    with file.open() as stream:
        data = b"".join(stream.read(size) for size in sizes)
    assert data == path.read_bytes()
    assert hasher.hexdigest() == digest_file(path)
    assert sum(counted) == size


def test_compressed_parquet_is_told_to_be_that(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet.gz"
    path.write_bytes(gzip.compress(parquet()))
    with pytest.raises(DataError, match="is compressed parquet") as caught:
        read(path, "auto")
    assert "gunzip" in caught.value.fix


def test_zstd_of_a_long_window_is_not_called_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.zst"
    parameters = zstandard.ZstdCompressionParameters(window_log=28)
    writer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    path.write_bytes(writer.compress(b"some words " * 300_000) + writer.flush())
    with pytest.raises(DataError, match="cannot decompress") as caught:
        read(path, "text")
    assert "--long=31" in caught.value.fix
