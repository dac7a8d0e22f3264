"""Bad input must name file and position; nothing of the corpus may be skipped silently."""

import gzip
import json
import os
import re
from pathlib import Path

import blake3
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from forge.core.errors import DataError
from forge.core.files import digest_file
from forge.core.tokenize_settings import Tokenize
from forge.data import corpus, decoding, parquet_pages
from forge.data.decoding import CHUNK_BYTES
from forge.data.text_formats import text as text_reader


def listed(*inputs: object) -> list[str]:
    return [file.name for file in corpus.list_files(Tokenize(inputs=list(map(str, inputs))))]


def read(path: Path, **settings: object) -> list[str]:
    chosen = Tokenize(inputs=[str(path)], **settings)
    return [
        text for file in corpus.list_files(chosen) for text in corpus.read_documents(file, chosen)
    ]


def write(path: Path, data: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


# --- which files --------------------------------------------------------------------------------


def test_directories_are_searched_and_hidden_files_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("texts/b.txt", "texts/sub/a.txt", "texts/.hidden", "texts/.git/x", "other.txt"):
        write(tmp_path / name, name)
    assert listed("texts") == ["texts/b.txt", "texts/sub/a.txt"]
    assert listed("./texts/", "other.txt") == ["other.txt", "texts/b.txt", "texts/sub/a.txt"]


def test_globs_search_nested_directories(tmp_path: Path) -> None:
    for name in ("a.txt", "x/b.txt", "x/y/c.txt", "x/y/c.md"):
        write(tmp_path / name, name)
    names = [f"{tmp_path}/{name}" for name in ("a.txt", "x/b.txt", "x/y/c.txt")]
    assert listed(tmp_path / "**/*.txt") == names


def test_a_file_that_two_inputs_name_is_listed_once(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "text")
    assert len(listed(tmp_path, file, tmp_path / "*.txt")) == 1


def test_brackets_in_a_file_name_are_not_a_glob(tmp_path: Path) -> None:
    file = write(tmp_path / "part[1].txt", "text")
    assert listed(file) == [str(file)]


def test_a_link_to_the_parent_directory_does_not_loop(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "text")
    (tmp_path / "up").symlink_to(tmp_path)
    assert listed(tmp_path) == [f"{tmp_path}/a.txt"]


@pytest.mark.parametrize("missing", ["absent.txt", "absent/*.txt", "empty"])
def test_an_input_without_files_is_named(tmp_path: Path, missing: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=re.escape(str(tmp_path / missing))):
        listed(tmp_path / missing)


def test_a_dangling_link_is_named(tmp_path: Path) -> None:
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"gone\.txt"):
        listed(tmp_path)


def test_stdlib_has_modules_and_topics_but_no_tests() -> None:
    names = listed("python:stdlib")
    assert {"python:stdlib/json/decoder.py", corpus.TOPICS} <= set(names)
    assert "python:stdlib/pydoc_data/topics.py" not in names
    assert not [name for name in names if re.search(r"/(tests?|site-packages)/", name)]


def test_stdlib_reads_with_the_strict_policy() -> None:
    settings = Tokenize()
    documents = [
        text
        for file in corpus.list_files(settings)
        for text in corpus.read_documents(file, settings)
    ]
    assert sum(map(len, documents)) > 5e6
    assert any(text.startswith("The standard type hierarchy") for text in documents)


def test_stdlib_honours_a_coding_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "os.py", "")
    write(tmp_path / "old.py", "# -*- coding: latin-1 -*-\nname = 'Müller'\n".encode("latin-1"))
    write(tmp_path / "broken.py", b"name = '\xfc'\n")
    monkeypatch.setattr(os, "__file__", str(tmp_path / "os.py"))
    settings = Tokenize()
    texts = [t for f in corpus.list_files(settings) for t in corpus.read_documents(f, settings)]
    assert texts == ["name = 'ü'\n", "# -*- coding: latin-1 -*-\nname = 'Müller'\n"]


# --- text ---------------------------------------------------------------------------------------


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.txt", "\ufeffone\r\ntwo\n")) == ["one\r\ntwo\n"]


@pytest.mark.parametrize("chunk_bytes", [1, 2, 3, 7, 1000])
def test_documents_do_not_depend_on_how_the_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(text_reader, "CHUNK_BYTES", chunk_bytes)
    text = "\ufeffeins ü---zwei 世界--- ---drei 🙂-----vier--"
    path = write(tmp_path / "a.txt", text)
    assert read(path, document_separator="---") == ["eins ü", "zwei 世界", "drei 🙂", "--vier--"]


@pytest.mark.parametrize("listed", [0, 3, 30])
def test_a_file_that_changed_its_size_after_it_was_listed_is_read_to_its_end(
    tmp_path: Path, listed: int
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one two three")
    file = corpus.InputFile("a.txt", str(path), listed)
    hasher = blake3.blake3()
    assert list(corpus.read_documents(file, Tokenize(), hasher=hasher)) == ["one two three"]
    assert hasher.hexdigest() == digest_file(path)


def test_blank_documents_are_skipped(tmp_path: Path) -> None:
    write(tmp_path / "empty.txt", "")
    path = write(tmp_path / "a.txt", "one\n%%\n \n%%\n")
    assert read(path.parent, document_separator="%%") == ["one\n"]


def test_a_document_beyond_the_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "MAX_DOCUMENT_BYTES", 2**20)
    monkeypatch.setattr(text_reader, "CHUNK_BYTES", 2**16)
    path = write(tmp_path / "a.txt", "x\n" * 2**20)
    with pytest.raises(DataError, match=r"a\.txt has a document of more than 1 MiB") as caught:
        read(path)
    assert "tokenize.document_separator" in caught.value.fix
    assert len(read(path, document_separator="\n")) == 2**20


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("chunk_bytes", [3, 2**20])
def test_invalid_utf8_is_named_by_its_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int, suffix: str
) -> None:
    monkeypatch.setattr(text_reader, "CHUNK_BYTES", chunk_bytes)
    data = "grün ".encode() + b"\xff bad \xfe"
    path = write(tmp_path / f"a.txt{suffix}", packed(data, suffix))
    with pytest.raises(DataError, match=r"a\.txt.* is not UTF-8 at byte offset 6 \(0xff\)"):
        read(path)


def test_an_incomplete_character_at_the_end_is_invalid(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="byte offset 2"):
        read(write(tmp_path / "a.txt", b"ab\xc3"))


def test_replace_warns_once_with_file_and_offset(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"a\xffb\xfec")
    settings = Tokenize(inputs=[str(path)], invalid_utf8="replace")
    (file,) = corpus.list_files(settings)
    warnings: list[str] = []
    assert list(corpus.read_documents(file, settings, warn=warnings.append)) == ["a\ufffdb\ufffdc"]
    assert len(warnings) == 1
    assert re.search(r"a\.txt is not UTF-8 at byte offset 1", warnings[0])


# --- JSONL --------------------------------------------------------------------------------------


def packed(data: bytes, suffix: str) -> bytes:
    if suffix == ".gz":
        return gzip.compress(data)
    if suffix == ".zst":  # two frames, as parallel compressors write them
        half = len(data) // 2
        return b"".join(map(zstandard.compress, (data[:half], data[half:])))
    return data


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_jsonl_gives_one_document_a_line(tmp_path: Path, suffix: str) -> None:
    texts = ["one\ntwo", "ü 世界 🙂"] * 50
    lines = "\n\n".join(json.dumps({"id": 1, "text": text}) for text in [*texts, ""])
    path = write(tmp_path / f"a.jsonl{suffix}", packed(lines.encode(), suffix))
    assert read(path) == texts


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_truncated_compressed_file_is_refused(tmp_path: Path, suffix: str) -> None:
    lines = b"".join(b'{"text": "%d"}\n' % number for number in range(10000))
    path = write(tmp_path / f"a.jsonl{suffix}", packed(lines, suffix)[:-5])
    with pytest.raises(DataError, match=rf"a\.jsonl{suffix} is corrupt"):
        read(path)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_file_that_is_not_packed_as_its_name_says_is_refused(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(DataError, match="is corrupt"):
        read(write(tmp_path / f"a.txt{suffix}", b"plain text, not packed at all"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json", r"a\.jsonl, line 3 is not JSON"),
        ('{"text": "a", "n": ' + "9" * 5000 + "}", r"a\.jsonl, line 3 is not JSON: .*4300 digits"),
        ('{"text": "cut', r"a\.jsonl, line 3 is not JSON: Unterminated string"),
        ('["text"]', r"line 3 is not an object"),
        ('{"body": "x", "id": 1}', r"line 3: field 'text' is missing; fields found: body, id"),
        ('{"text": null}', r"line 3: field 'text' is NoneType, not a string"),
        ('{"text": 7}', r"line 3: field 'text' is int, not a string; fields found: text"),
        (r'{"text": "\ud83d"}', r"has a lone surrogate \\ud83d at line 3"),
    ],
)
def test_a_bad_jsonl_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "fine"}\n\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        read(path)


def test_bad_bytes_in_jsonl_are_named_by_their_offset_in_the_file(tmp_path: Path) -> None:
    first = b'{"text": "fine"}\n'
    path = write(tmp_path / "a.jsonl", first + b'{"text": "\xff"}\n')
    with pytest.raises(DataError, match=f"byte offset {len(first) + 10}"):
        read(path)
    assert read(path, invalid_utf8="replace") == ["fine", "\ufffd"]


def test_lone_surrogates_are_replaced_on_request(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", r'{"text": "a\ud83db"}')
    assert read(path, invalid_utf8="replace") == ["a\ufffdb"]


def test_a_jsonl_line_beyond_the_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "MAX_DOCUMENT_BYTES", 100)
    path = write(tmp_path / "a.jsonl", '{"text": "fine"}\n' + json.dumps({"text": "x" * 200}))
    with pytest.raises(DataError, match="has at line 2 a line of more than"):
        read(path)


def test_text_field_and_format_can_be_chosen(tmp_path: Path) -> None:
    path = write(tmp_path / "data.log", '{"body": "one"}\n')
    assert read(path, format="jsonl", text_field="body") == ["one"]
    assert read(path) == ['{"body": "one"}\n']


# --- parquet ------------------------------------------------------------------------------------


def parquet(path: Path, row_group_size: int = 2, **columns: object) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=row_group_size)
    return path


def test_parquet_gives_one_document_a_row(tmp_path: Path) -> None:
    texts = [f"text {number} ü" for number in range(5)]
    path = parquet(tmp_path / "a.parquet", text=texts, id=list(range(5)))
    assert read(path) == texts
    category = pyarrow.array(texts).dictionary_encode()
    assert read(parquet(tmp_path / "b.parquet", text=category).parent) == texts * 2


def test_a_bad_parquet_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="field 'text' is missing; fields found: body, id"):
        read(parquet(tmp_path / "a.parquet", body=["x"], id=[1]))
    with pytest.raises(DataError, match="field 'text' is int64, not a string"):
        read(parquet(tmp_path / "a.parquet", text=[1]))
    with pytest.raises(DataError, match=r"a\.parquet, row 4: field 'text' is null"):
        read(parquet(tmp_path / "a.parquet", text=["a", "b", "c", None]))
    whole = (tmp_path / "a.parquet").read_bytes()
    with pytest.raises(DataError, match=r"a\.parquet is corrupt"):
        read(write(tmp_path / "a.parquet", whole[:-20]))


def test_bad_bytes_in_parquet_are_named_by_row(tmp_path: Path) -> None:
    bad = pyarrow.array([b"fine", b"ab\xff"]).view(pyarrow.string())
    path = parquet(tmp_path / "a.parquet", text=bad)
    with pytest.raises(DataError, match=r"a\.parquet is not UTF-8 at row 2, byte 2 of its text"):
        read(path)
    assert read(path, invalid_utf8="replace") == ["fine", "ab\ufffd"]


def allocated_at_the_first_document(path: Path, length: int) -> int:
    """Bytes that pyarrow holds."""
    chosen = Tokenize(inputs=[str(path)])
    (file,) = corpus.list_files(chosen)
    before = pyarrow.total_allocated_bytes()
    documents = corpus.read_documents(file, chosen)
    assert len(next(documents)) == length
    held = pyarrow.total_allocated_bytes() - before
    del documents
    return held


def test_rows_that_share_a_long_text_are_not_decoded_all_at_once(tmp_path: Path) -> None:
    shared = pyarrow.DictionaryArray.from_arrays([0] * 400, ["x" * 2**20])
    path = parquet(tmp_path / "a.parquet", 400, text=shared)
    assert path.stat().st_size < 2**16
    assert allocated_at_the_first_document(path, 2**20) < 2**28


def test_long_rows_at_the_start_are_not_decoded_all_at_once(tmp_path: Path) -> None:
    texts = ["x" * 2**20] * 400 + ["short"] * 10_000
    table, path = pyarrow.table({"text": texts}), tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table, path, use_dictionary=False, write_batch_size=1)
    assert allocated_at_the_first_document(path, 2**20) < 2**28


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("dictionary", [True, False])
def test_parquet_of_any_layout_is_read(tmp_path: Path, version: str, dictionary: bool) -> None:
    texts = [f"{number} " * (number % 50) + "end" for number in range(3000)]
    options = {"data_page_version": version, "use_dictionary": dictionary, "data_page_size": 2000}
    table, path = pyarrow.table({"id": range(3000), "text": texts}), tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table, path, row_group_size=1000, **options)
    assert read(path) == texts


def test_page_that_decompresses_to_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = parquet(tmp_path / "a.parquet", text=["x" * 2**21])
    monkeypatch.setattr(parquet_pages, "MAX_PAGE_BYTES", 2**20)
    with pytest.raises(DataError, match=r"a\.parquet has a page of 2 MiB, at most 1 are read"):
        read(path)


def test_parquet_with_a_bad_page_header_is_corrupt(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", text=["x"])
    data = bytearray(path.read_bytes())
    for bad in (b"\xff", b"\x1c", b"\x15\x01"):
        data[4 : 4 + 8 * len(bad)] = bad * 8
        with pytest.raises(DataError, match=r"a\.parquet is corrupt: .*page header"):
            read(write(path, bytes(data)))


# --- progress -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_progress_ends_at_the_size_on_disk(tmp_path: Path, name: str) -> None:
    lines = b'{"text": "x"}\n' * 1000
    if name.endswith("parquet"):
        parquet(tmp_path / name, text=["x"] * 1000)
    else:
        write(tmp_path / name, packed(lines, Path(name).suffix))
    settings = Tokenize(inputs=[str(tmp_path)])
    (file,) = corpus.list_files(settings)
    steps: list[int] = []
    list(corpus.read_documents(file, settings, consumed=steps.append))
    assert sum(steps) == file.size


@pytest.mark.parametrize("size", [0, 5, 2 * CHUNK_BYTES])
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.zst", "a.jsonl", "a.parquet"])
def test_documents_are_read_with_the_digest_of_the_file(
    tmp_path: Path, name: str, size: int
) -> None:
    path, text = tmp_path / name, "x" * size
    data = json.dumps({"text": text}).encode() if name == "a.jsonl" else text.encode()
    if name == "a.parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": [text]}), path)
    elif name.endswith(".zst"):
        # Bytes in a second frame, which holds nothing: a part of the file all the same.
        path.write_bytes(zstandard.compress(data) + zstandard.compress(b""))
    else:
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    (file,) = corpus.list_named([str(path)])
    hasher = blake3.blake3()
    found = list(corpus.read_documents(file, Tokenize(inputs=[str(path)]), hasher=hasher))
    assert "".join(found) == text
    assert hasher.hexdigest() == digest_file(path)


def test_a_line_that_only_json_reads_is_a_document(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "plain"}\n{"text": "with", "score": NaN}\n')
    settings = Tokenize(inputs=[str(path)])
    (file,) = corpus.list_files(settings)
    assert list(corpus.read_documents(file, settings)) == ["plain", "with"]
