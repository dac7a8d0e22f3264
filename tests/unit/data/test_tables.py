"""CSV once trained as text, with its commas; README.md of a data set beside its rows."""

from __future__ import annotations

import csv
import gzip
import json
import random
from pathlib import Path

import pytest

from forge.core.config import Config
from forge.core.errors import DataError
from forge.core.files import canonical, digest_bytes
from forge.core.tokenize_settings import Tokenize
from forge.data import content_ids, corpus, decoding
from forge.data.shards import ShardSet
from forge.data.tokenize import tokenize
from forge.data.tokenizer import build_tokenizer

TEXTS = [
    "one, two",
    'she said "no"',
    "first\nsecond\r\nthird",
    "ü 世界 🙂",
    " spaces ",
    "'",
    "a\tb",
]


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    content_ids._cached_listing_digest.cache_clear()


def read(*inputs: str, **settings: object) -> list[str]:
    chosen = Tokenize(inputs=list(inputs), **settings)
    return [
        text for file in corpus.list_files(chosen) for text in corpus.read_documents(file, chosen)
    ]


def write(name: str, data: bytes | str) -> str:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return name


def table(texts: list[str], separator: str = ",", column: str = "text", end: str = "\r\n") -> str:
    path = Path("made.table")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=separator, lineterminator=end)
        writer.writerow(["id", column])
        writer.writerows(enumerate(texts))
    return path.read_bytes().decode()


# --- CSV and TSV ------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "A.CSV", "a.csv.gz", "a.TSV.GZ"])
def test_each_row_is_a_document(name: str, end: str) -> None:
    data = table(TEXTS, "\t" if ".tsv" in name.lower() else ",", end=end).encode()
    write(name, gzip.compress(data) if name.lower().endswith("gz") else data)
    assert read(name) == TEXTS


def test_random_cells_come_back() -> None:
    draw = random.Random(49)
    texts = [
        "x" + "".join(draw.choices("ab,\"\n\r\t;'ü", k=draw.randrange(30))) for _ in range(500)
    ]
    for name, separator in (("a.csv", ","), ("a.tsv", "\t")):
        assert read(write(name, table(texts, separator))) == texts


def test_a_mark_of_utf8_and_empty_lines_are_no_text() -> None:
    assert read(write("a.csv", "\ufefftext\n\none\n\n\ntwo\n")) == ["one", "two"]
    assert read(write("b.csv", "")) == []


def test_format_and_column_can_be_chosen() -> None:
    write("a.dat", table(TEXTS, "\t", column="body"))
    assert read("a.dat", format="tsv", text_field="body") == TEXTS


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("id,body\n1,x\n", r"a\.csv: field 'text' is missing; fields found: id, body"),
        ("text,text\nx,y\n", "field 'text' exists 2 times"),
        ("id;text\n1;x\n", r"is missing \(its first line has ';'; columns are separated by commas"),
        ("id,text\n1,a, b\n", "line 2: a row of 3 cells; the first row names 2 columns"),
        ("id,text\n1\n", "line 2: a row of 1 cells"),
        ('id,text\n1,ok\n2,"no" end\n', "line 3: ',' expected after '\"'"),
        ('id,text\n1,"no end\n2,x\n', "line 2: unexpected end of data"),
        ("id,text\r1,x\r2,y\r", "line 1: new-line character seen in unquoted field"),
        ("id,text\n1,a\0b\n", "NUL character at byte offset 11"),
    ],
)
def test_a_bad_table_is_named(rows: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(write("a.csv", rows))


def test_a_missing_column_is_refused_with_the_key_to_set() -> None:
    with pytest.raises(DataError) as caught:
        read(write("a.csv", "id,body\n1,x\n"))
    assert caught.value.fix.startswith("set tokenize.text_field")


def test_bad_bytes_of_a_table_are_named_by_their_offset() -> None:
    write("a.csv", b"id,text\n1,caf\xe9\n")
    with pytest.raises(DataError, match="byte offset 13"):
        read("a.csv")
    assert read("a.csv", invalid_utf8="replace") == ["caf\ufffd"]


def test_a_huge_cell_is_a_document_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(write("a.csv", table(["x" * 2**20]))) == ["x" * 2**20]
    monkeypatch.setattr(decoding, "MAX_DOCUMENT_BYTES", 1000)
    for text, message in (
        ("x" * 2000, "a line of more than"),
        ("x\n" * 900, "larger than field limit"),
    ):
        with pytest.raises(DataError, match=message):
            read(write("a.csv", table([text])))


# --- ids --------------------------------------------------------------------------------------------


def ids(**settings: object) -> str:
    content_ids._cached_listing_digest.cache_clear()
    return content_ids.resolve_ids(Config(tokenize=Tokenize(**settings))).tokens


def test_only_names_that_are_read_otherwise_now_have_other_lists() -> None:
    def digest(*inputs: str, kind: str = "auto") -> str:
        return content_ids._cached_listing_digest(inputs, kind, "", "")

    def as_before(*entries: object) -> str:
        return digest_bytes(canonical(list(entries)))

    for name in ("a.txt", "a.jsonl", "a.json.gz", "a.parquet", "a.txt.zst", "README.md"):
        write(name, "x")
        assert digest(name) == as_before((name, 1))
    url = "hf://datasets/ada/texts@main/*.{}"
    assert digest(url.format("jsonl")) == as_before("datasets/ada/texts@main/*.jsonl")
    assert digest("rule:a.txt") == as_before("a.txt")
    for name in ("a.csv", "a.TSV.gz", "a.jsonl.GZ", "a.zstd"):
        write(name, "x")
        assert digest(name) != as_before((name, 1))
    assert digest(url.format("csv")) != as_before("datasets/ada/texts@main/*.csv")
    assert digest("rule:a.csv") != as_before("a.csv")
    assert digest("a.csv", kind="text") == as_before(("a.csv", 1))


def made(inputs: list[str]) -> Path:
    settings = {"inputs": inputs, "val_fraction": 0.3}
    config = content_ids.resolve(Config(tokenizer={"vocab_size": 270}, tokenize=settings))
    build_tokenizer(config)
    return tokenize(config, workers=1)


def test_tokens_of_a_table_that_was_read_as_text_are_refused_when_they_are_opened() -> None:
    folder = made([write("a.csv", table([f"text {number}" for number in range(30)]))])
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    assert manifest["settings"].pop("readings") == ["by column"]
    assert sum(total["documents"] for total in manifest["totals"].values()) == 30
    assert ShardSet.open(folder)
    path.write_text(json.dumps(manifest))  # as of an earlier version
    with pytest.raises(DataError, match=r"a\.csv was not read by column"):
        ShardSet.open(folder)
    assert made(["a.csv"]) == folder and ShardSet.open(folder)  # made again


@pytest.mark.parametrize(
    "name",
    ["a.tar", "a.tar.gz", "a.jsonl.GZ", "a.txt.xz", "hf://datasets/ada/texts/.gitattributes"],
)
def test_tokens_of_what_is_no_text_are_refused_when_they_are_opened(name: str) -> None:
    folder = made([write(f"{number}.txt", f"text {number}") for number in range(30)])
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    assert "readings" not in manifest["settings"]
    manifest["inputs"][0]["name"] = name
    path.write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="are not those of the text"):
        ShardSet.open(folder)


# --- a directory with rows and other files ------------------------------------------------------------

ROWS = {
    "train.jsonl": '{"text": "a row"}\n',
    "train.csv": "text\na row\n",
    "train.json.gz": gzip.compress(b'{"text": "a row"}\n'),
}
ABOUT = [
    "README.md",
    "LICENSE",
    "load.py",
    "index.html",
    "sub/picture.png",
    "notes.rst",
    "Makefile",
]


@pytest.mark.parametrize("about", ABOUT)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("inputs", ["clone", "clone/**", "clone/"])
def test_files_about_a_data_set_are_refused_beside_its_rows(
    inputs: str, rows: str, about: str
) -> None:
    write(f"clone/{rows}", ROWS[rows])
    write(f"clone/{about}", "about the data")
    write("clone/.gitattributes", "*.parquet filter=lfs\n")
    if inputs == "clone/**" and "/" in about:
        inputs = "clone/**/*.*"
    with pytest.raises(DataError) as caught:
        read(inputs)
    assert f"clone/{about}" in caught.value.what
    assert "name what is text of the corpus, by its endings" in caught.value.fix
    advised = caught.value.fix.rpartition(": ")[2]
    assert read(*advised.split(", ")) == ["a row"]


def test_texts_beside_rows_are_both_read() -> None:
    write("in/a.jsonl", ROWS["train.jsonl"])
    write("in/b.txt", "a text")
    assert read("in") == ["a row", "a text"]


def test_what_is_named_by_itself_is_read() -> None:
    write("clone/train.jsonl", ROWS["train.jsonl"])
    write("clone/README.md", "about the data")
    assert read("clone/*.jsonl", "clone/README.md") == ["about the data", "a row"]
    assert read("clone/*", format="text") == ["about the data", ROWS["train.jsonl"]]


def test_a_readme_beside_texts_is_read_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("in/README.md", "in/a.txt", "in/b.md"):
        write(name, name)
    assert read(f"{tmp_path}/in") == ["in/README.md", "in/a.txt", "in/b.md"]
    assert f"{tmp_path}/in/README.md read as text of the corpus" in capsys.readouterr().err
