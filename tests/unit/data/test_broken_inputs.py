"""Broken files, names and numbers end `forge tokenizer` and `forge tokenize` without a traceback."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from forge import cli
from forge.core.config import Config
from forge.core.errors import ConfigError, DataError, Exit
from forge.core.tokenize_settings import Tokenize
from forge.data import content_ids, corpus, tokenize
from forge.data.content_ids import resolve
from forge.data.shards import ShardSet
from forge.data.tokenizer import build_tokenizer, load_tokenizer
from forge.staging import archive

# JSON of other shapes than expected, and what is no JSON for reasons of its own.
SHAPES = {
    "a list": "[]",
    "a number": "1",
    "null": "null",
    "an empty object": "{}",
    "nothing": "",
    "nested deeply": "[" * 100_000,
    "a number of 5000 digits": "9" * 5000,
    "no UTF-8": b"\xff\xfe",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project directory with tokenizer and shards."""
    root = tmp_path_factory.mktemp("made")
    (root / "texts").mkdir()
    for number in range(30):
        (root / "texts" / f"{number}.txt").write_text(f"text {number} of some words")
    values = {
        "data": "data",
        "tokenizer": {"vocab_size": 280},
        "tokenize": {"inputs": ["texts"], "val_fraction": 0.4},
    }
    (root / "config.yaml").write_text(json.dumps(values))
    with contextlib.chdir(root):
        assert cli.main(["tokenizer", "config.yaml"]) == Exit.DONE
        assert cli.main(["tokenize", "config.yaml"]) == Exit.DONE
    return root


@pytest.fixture
def place(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of `made` that a test may change, and works in."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    content_ids._cached_listing_digest.cache_clear()
    return tmp_path


def the(place: Path, pattern: str) -> Path:
    (path,) = (place / "data").glob(pattern)
    return path


def break_file(path: Path, content: str | bytes) -> None:
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def ends(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and message of a subcommand on config.yaml."""
    capsys.readouterr()
    verb, *rest = arguments
    code = cli.main([verb, "config.yaml", *rest])
    said = capsys.readouterr().err
    assert "Traceback" not in said, said
    return code, said


# --- what was made before -----------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_a_tokenizer_manifest_with_wrong_keys_is_named_and_rebuilt(
    place: Path, capsys: pytest.CaptureFixture[str], shape: str
) -> None:
    path = the(place, "tokenizers/*/manifest.json")
    right = path.read_bytes()
    break_file(path, SHAPES[shape])
    code, said = ends(capsys, "tokenize")
    assert (code, "manifest.json" in said) == (Exit.DATA, True)
    assert ends(capsys, "tokenizer")[0] == Exit.DONE
    assert path.read_bytes() == right


@pytest.mark.parametrize(
    "change", [{"digest": 5}, {"eos_id": 1}, {"vocab_size": "280"}, {"id": []}]
)
def test_a_tokenizer_manifest_with_other_values_is_refused(
    place: Path, capsys: pytest.CaptureFixture[str], change: dict[str, object]
) -> None:
    path = the(place, "tokenizers/*/manifest.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    code, said = ends(capsys, "tokenize")
    assert code == Exit.DATA
    assert next(iter(change)) in said or "has 280 ids and id 0 for '<|endoftext|>'" in said


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["manifest.json", "parts/part-00000.json"])
def test_records_of_shards_with_wrong_keys_are_rebuilt(
    place: Path, capsys: pytest.CaptureFixture[str], name: str, shape: str
) -> None:
    path = the(place, f"tokens/*/{name}")
    right = path.read_bytes()
    the(place, "tokens/*/manifest.json").unlink()
    break_file(path, SHAPES[shape])
    assert ends(capsys, "tokenize")[0] == Exit.DONE
    assert path.read_bytes() == right


@pytest.mark.parametrize("shape", SHAPES)
def test_an_index_of_another_shape_is_not_an_archive(tmp_path: Path, shape: str) -> None:
    break_file(tmp_path / "archive.json", SHAPES[shape])
    assert archive.Archive.open(tmp_path) is None


def test_a_shard_name_beyond_255_bytes_is_refused(place: Path) -> None:
    path = the(place, "tokens/*/manifest.json")
    values = json.loads(path.read_text())
    values["splits"]["train"][0]["file"] = "a" * 300 + ".bin"
    path.write_text(json.dumps(values))
    with pytest.raises(DataError, match=r"splits\.train\.0\.file"):
        ShardSet.open(path.parent)


@pytest.mark.parametrize(
    ("pattern", "verb"),
    [
        ("tokenizers/*/tokenizer.json", "tokenize"),
        ("tokenizers/*/tokenizer.json", "tokenizer"),
        ("tokenizers/*/manifest.json", "tokenize"),
        ("tokens/*/manifest.json", "tokenize"),
        ("tokens/*/train-00000-000.bin", "tokenize"),
    ],
)
def test_a_directory_where_a_file_is_expected_is_named(
    place: Path, capsys: pytest.CaptureFixture[str], pattern: str, verb: str
) -> None:
    path = the(place, pattern)
    path.unlink()
    path.mkdir()
    code, said = ends(capsys, verb)
    assert code in (Exit.DATA, Exit.UNFIT)
    assert path.name in said


# --- arguments and names ------------------------------------------------------------------------


@pytest.mark.parametrize("workers", ["-1", "0"])
def test_less_than_one_worker_is_refused(
    place: Path, capsys: pytest.CaptureFixture[str], workers: str
) -> None:
    code, said = ends(capsys, "tokenize", f"--workers={workers}")
    assert code == Exit.CONFIG
    assert f"--workers is {workers}, but must be 1 or more" in said


def test_many_workers_are_as_many_as_cores(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ends(capsys, "tokenize", "--workers=99999999999")[0] == Exit.DONE
    asked: list[int] = []
    monkeypatch.setattr(tokenize, "tokenize", lambda config, workers: asked.append(workers))
    ends(capsys, "tokenize", "--workers=99999999999")
    assert asked == [len(os.sched_getaffinity(0))]


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a", "Too many levels of symbolic links"),
        ("a/x", "Too many levels of symbolic links"),
        ("", "Too many levels of symbolic links"),  # the folder with both
        ("pipe", "pipe is not a regular file"),
    ],
)
def test_an_input_that_is_not_a_file_is_named(odd: Path, name: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        corpus.list_files(Tokenize(inputs=[f"{odd}/{name}"]))
    assert "tokenize.inputs" in caught.value.what


@pytest.mark.parametrize("spec", ["folder", "folder/*.txt"])
def test_a_file_whose_name_is_not_utf8_is_refused_before_anything_is_read(
    place: Path, spec: str
) -> None:
    (place / "folder").mkdir()
    (place / "folder" / "M\udcfcller.txt").write_text("some text")  # Müller in Latin-1
    with pytest.raises(
        DataError, match=r"the name of b'folder/M\\xfcller.txt' is not UTF-8"
    ) as caught:
        corpus.list_files(Tokenize(inputs=[spec]))
    caught.value.what.encode()  # it can be printed


@pytest.mark.parametrize("token", ["\ud800", "a\udfffb"])
def test_an_end_of_text_token_that_is_not_utf8_is_refused(place: Path, token: str) -> None:
    inputs = {"inputs": ["texts"]}
    with pytest.raises(ConfigError, match="is not UTF-8"):
        build_tokenizer(
            resolve(Config(data="data", tokenizer={"eos_token": token}, tokenize=inputs))
        )


@pytest.mark.parametrize("path", ["texts", "texts/0.txt/x", "."])
def test_a_tokenizer_path_that_is_not_a_file_is_named(
    place: Path, capsys: pytest.CaptureFixture[str], path: str
) -> None:
    code, said = ends(capsys, "tokenizer", "--tokenizer.source=path", f"--tokenizer.path={path}")
    assert (code, "there is no such file" in said) == (Exit.CONFIG, True)


def test_a_log_accepts_names_that_are_not_utf8(place: Path) -> None:
    (place / "texts" / "odd.jsonl").write_text('{"\\ud800": 1}')
    command = [sys.executable, "-m", "forge", "tokenizer", "config.yaml", "--log=log"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (Exit.DATA, False)
    assert "fields found: \\ud800" in (place / "log").read_text()


# --- contents -----------------------------------------------------------------------------------


def read(path: Path, **values: object) -> list[str]:
    chosen = Tokenize(inputs=[str(path)], **values)
    return [t for f in corpus.list_files(chosen) for t in corpus.read_documents(f, chosen)]


def test_a_parquet_file_with_two_text_columns_is_named(tmp_path: Path) -> None:
    column = pyarrow.array(["one", "two"])
    table = pyarrow.Table.from_arrays([column, column], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: field 'text' exists 2 times"):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    "line", ["9" * 5000, '{"text": "a", "n": -' + "9" * 5000 + "}", "[" * 10**5]
)
def test_json_that_python_does_not_read_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line)
    with pytest.raises(DataError, match=r"a\.jsonl, line 2 is not JSON"):
        read(tmp_path / "a.jsonl")


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.zst"])
def test_an_empty_compressed_file_is_corrupt(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(DataError, match="is corrupt: it is empty"):
        read(tmp_path / name)


def damaged(data: bytes, flips: list[tuple[int, int]], length: int) -> bytes:
    """Flip bits at positions, then truncate to a length (both modulo the size)."""
    changed = bytearray(data)
    for place, bit in flips:
        changed[place % len(changed)] ^= 1 << bit
    return bytes(changed[: length % (len(data) + 1)])


flips = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 7)), max_size=8)


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.gz", "a.jsonl.zst", "a.jsonl", "a.txt"])
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flips=flips, cut=st.integers(0, 2000) | st.just(-1))
@example(flips=[(2045, 0)], cut=-1)  # in the name of the parquet file's column, in its row group
def test_damage_anywhere_is_text_or_a_message_that_names_the_file(
    tmp_path: Path, name: str, flips: list[tuple[int, int]], cut: int
) -> None:
    texts = [f"text {number} ü 世界" for number in range(200)]
    whole = tmp_path / f"whole.{name}"
    if not whole.exists():
        write: Callable[[Path, list[str]], None] = (
            write_parquet if name == "a.parquet" else write_lines
        )
        write(whole, texts)
        assert read(whole) == (texts if "json" in name or "parquet" in name else ["\n".join(texts)])
    path = tmp_path / name
    path.write_bytes(damaged(whole.read_bytes(), flips, cut))
    try:
        for text in read(path):
            text.encode()
    except DataError as err:
        assert path.name in err.what


def write_parquet(path: Path, texts: list[str]) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=50)


def write_lines(path: Path, texts: list[str]) -> None:
    packing = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix)
    lines = [json.dumps({"text": text}) for text in texts] if "json" in path.name else texts
    with pyarrow.output_stream(str(path), compression=packing) as file:
        file.write("\n".join(lines).encode())


# --- from text to shards and back ---------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokenizer")
    (root / "a.txt").write_text("END of the text, the END\n" * 50)
    settings = {"vocab_size": 300, "eos_token": "END"}
    inputs = {"inputs": [str(root / "a.txt")]}
    return build_tokenizer(resolve(Config(data=str(root), tokenizer=settings, tokenize=inputs)))


# Without NUL, which counts as no text (data/not_text.py).
TEXT = st.characters(codec="utf-8", exclude_characters="\0")
texts = st.text(TEXT, max_size=30) | st.just("END") | st.just(" the END ")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(documents=st.lists(texts, min_size=1, max_size=20))
def test_what_is_written_to_shards_reads_back_as_the_same_documents(
    tmp_path: Path, tokenizer_folder: Path, documents: list[str]
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": document}) for document in documents))
    expected = [document for document in documents if document and not document.isspace()]
    chosen = Tokenize(inputs=[str(path)], val_fraction=0.4)
    shutil.rmtree(tmp_path / "shards", ignore_errors=True)
    tokenize._job = tokenize._Job(tmp_path / "shards", tokenizer_folder, chosen, fast=True)
    record, _ = tokenize._make_part(0, corpus.list_files(chosen), lambda _: None)
    part = tokenize.FinishedPart.model_validate_json(record)
    tokenizer = load_tokenizer(tokenizer_folder)
    for split in ("train", "val"):
        ids = [
            number
            for shard in part.splits[split]
            for number in np.fromfile(tmp_path / "shards" / shard.file, dtype="<u2").tolist()
        ]
        assert found_in(ids, tokenizer.eos_id, tokenizer.decode) == [
            text for text in expected if tokenize.split_of(text, 0.4) == split
        ]
        assert ids.count(tokenizer.eos_id) == sum(s.documents for s in part.splits[split])


def found_in(ids: list[int], eos_id: int, decode: Callable[[list[int]], str]) -> list[str]:
    return [decode(document) for document in _cut(ids, eos_id)]


def _cut(ids: list[int], eos_id: int) -> Iterator[list[int]]:
    while ids:
        end = ids.index(eos_id)
        yield ids[:end]
        ids = ids[end + 1 :]
