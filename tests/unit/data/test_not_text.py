"""Archives, compressed bytes, UTF-16 and pointers are bytes that an encoder takes silently."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import sqlite3
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from forge.core.errors import DataError
from forge.core.tokenize_settings import Tokenize
from forge.data import corpus

TEXT = "A plain text of some words.\n" * 200
PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"


def read(path: Path, **settings: object) -> list[str]:
    chosen = Tokenize(inputs=[str(path)], **settings)
    return [
        text for file in corpus.list_files(chosen) for text in corpus.read_documents(file, chosen)
    ]


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def tar(text: str = TEXT) -> bytes:
    made, data = io.BytesIO(), text.encode()
    with tarfile.open(fileobj=made, mode="w") as archive:
        member = tarfile.TarInfo("a.txt")
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    return made.getvalue()


def zipped() -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("a.txt", TEXT)
    return made.getvalue()


def table() -> bytes:
    made = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": [TEXT]}), made)
    return made.getvalue()


def database(folder: Path) -> bytes:
    with sqlite3.connect(folder / "made.db") as made:
        made.execute("create table t (a)")
    made.close()
    return (folder / "made.db").read_bytes()


def array() -> bytes:
    made = io.BytesIO()
    np.save(made, np.arange(9))
    return made.getvalue()


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 123456\n"
NOT_TEXT = {
    "gzip": (gzip.compress(TEXT.encode()), r"compressed by gzip"),
    "zstd": (zstandard.compress(TEXT.encode()), "compressed by zstd"),
    "xz": (lzma.compress(TEXT.encode()), "compressed by xz"),
    "bzip2": (bz2.compress(TEXT.encode()), "compressed by bzip2"),
    "empty bzip2": (bz2.compress(b""), "compressed by bzip2"),
    "zip": (zipped(), "a zip archive"),
    "tar": (tar(), "a tar archive"),
    "pdf": (b"%PDF-1.7\n1 0 obj\n", "a PDF document"),
    "png": (PNG, "an image"),
    "elf": (Path(sys.executable).read_bytes()[:4096], "a program"),
    "parquet": (table(), "a parquet file"),
    "numpy": (array(), "a file of numbers"),
    "lfs": (POINTER.encode(), "a pointer of Git LFS"),
    "annex": (b"/annex/objects/SHA256E-s9--00.txt\n", "a pointer of git-annex"),
    "utf16 with mark": (TEXT.encode("utf-16"), "text in UTF-16"),
    "utf32 with mark": (TEXT.encode("utf-32"), "text in UTF-32"),
}


@pytest.mark.parametrize("policy", ["error", "replace"])
@pytest.mark.parametrize("name", ["a", "a.txt", "a.BIN", "a.jsonl"])
@pytest.mark.parametrize("kind", NOT_TEXT)
def test_a_file_that_holds_no_text_is_refused_by_its_first_bytes(
    tmp_path: Path, kind: str, name: str, policy: str
) -> None:
    data, what = NOT_TEXT[kind]
    with pytest.raises(DataError, match=what) as caught:
        read(write(tmp_path / name, data), invalid_utf8=policy)
    assert name in caught.value.what and "replace" not in caught.value.fix


def test_a_database_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a database of SQLite"):
        read(write(tmp_path / "a.txt", database(tmp_path)))


@pytest.mark.parametrize("name", ["a.tar.gz", "a.gz", "a.txt.zst", "A.TAR.GZ", "a.zstd"])
def test_what_is_compressed_is_looked_at_after_it_was_unpacked(tmp_path: Path, name: str) -> None:
    compress = gzip.compress if name.lower().endswith("gz") else zstandard.compress
    for data, what in ((tar(), "a tar archive"), NOT_TEXT["lfs"], NOT_TEXT["gzip"]):
        with pytest.raises(DataError, match=what):
            read(write(tmp_path / name, compress(data)))


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize(
    "text", [TEXT, "Съешь же ещё этих мягких булок.\n" * 50, "שלום עולם\n" * 9]
)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_utf16_without_a_byte_order_mark_is_named(
    tmp_path: Path, name: str, text: str, encoding: str
) -> None:
    data = (json.dumps({"text": text}) if name.endswith("l") else text).encode(encoding)
    with pytest.raises(DataError, match="NUL character at byte offset") as caught:
        read(write(tmp_path / name, data), invalid_utf8="replace")
    assert f"text in {encoding.replace('-le', 'LE').replace('-be', 'BE').upper()} without" in str(
        caught.value
    )


def test_a_nul_far_behind_is_named_by_its_offset(tmp_path: Path) -> None:
    place = 3 * 2**20 + 5
    data = bytearray(b"a" * (4 * 2**20))
    data[place] = 0
    with pytest.raises(DataError, match=f"NUL character at byte offset {place}"):
        read(write(tmp_path / "a.txt", bytes(data)))
    with pytest.raises(DataError, match=f"NUL character at byte offset {place}"):
        read(write(tmp_path / "b.txt.gz", gzip.compress(bytes(data))))


def test_seven_bits_of_japanese_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="ISO-2022 at byte offset 6"):
        read(write(tmp_path / "a.txt", "hello 世界".encode("iso2022_jp")))


@pytest.mark.parametrize("name", ["a.txt.GZ", "a.TXT.Gz", "a.txt.zstd", "a.txt.ZST", "a.ZSTD"])
def test_an_ending_is_read_in_any_case(tmp_path: Path, name: str) -> None:
    compress = gzip.compress if name.lower().endswith("gz") else zstandard.compress
    assert read(write(tmp_path / name, compress(TEXT.encode()))) == [TEXT]


def test_rows_of_an_ending_in_any_case_are_documents(tmp_path: Path) -> None:
    rows = b'{"text": "one"}\n{"text": "two"}\n'
    assert read(write(tmp_path / "a.JSONL.GZ", gzip.compress(rows))) == ["one", "two"]
    assert read(write(tmp_path / "a.jsonl.zstd", zstandard.compress(rows))) == ["one", "two"]


def test_utf16_that_a_table_has_as_characters_is_refused(tmp_path: Path) -> None:
    wide = TEXT.encode("utf-16-le").decode("ascii")
    path = write(tmp_path / "a.jsonl", json.dumps({"text": wide}).encode())
    with pytest.raises(DataError, match="5600 NUL characters of 11200"):
        read(path)


def test_a_few_nul_characters_of_json_are_text(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.jsonl", json.dumps({"text": "ab\0cde"}).encode())) == [
        "ab\0cde"
    ]


def test_a_pointer_in_place_of_a_parquet_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a pointer of Git LFS") as caught:
        read(write(tmp_path / "a.parquet", POINTER.encode()))
    assert caught.value.fix == "fetch the file: git lfs pull"


@pytest.mark.parametrize(
    "text",
    [
        "version https://git-lfs.github.com/spec/v1 is how a pointer begins",
        "PK is a prefix",
        "BZh is none",
        "GIF is an image format",
        "PAR1 stands at the start",
        "Obj of C",
        "PDF: %PDF-1.7",
        "ustar" * 100,
        "Rar! said the dragon",
        "MZ.",
        "\ufeffwith a mark of UTF-8",
        "\x1b[31mred\x1b[0m of a terminal",
        "\x0c form feed, \x08 and \x07",
    ],
)
def test_text_that_begins_alike_is_text(tmp_path: Path, text: str) -> None:
    assert read(write(tmp_path / "a.txt", text.encode())) == [text.removeprefix("\ufeff")]


def test_bytes_of_no_known_kind_are_not_advised_to_be_replaced(tmp_path: Path) -> None:
    data = np.random.default_rng(1).integers(1, 256, 5000, dtype=np.uint8).tobytes()
    with pytest.raises(DataError) as caught:
        read(write(tmp_path / "a.br", b"text" + data.replace(b"\x1b$", b"")))
    assert "replace" not in caught.value.fix
    with pytest.raises(DataError, match="is not UTF-8") as caught:
        read(write(tmp_path / "b.txt", (TEXT + "caf\xe9").encode("latin-1")))
    assert "tokenize.invalid_utf8: replace" in caught.value.fix
