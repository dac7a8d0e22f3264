"""Each mixture of ending, bytes and directory gives the texts, each once, or is refused by name."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import shutil
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from forge.core.config import Config
from forge.core.errors import DataError
from forge.core.tokenize_settings import Tokenize
from forge.data import corpus

TEXTS = [f'text {number}, with "quotes", ü and\na second line' for number in range(3)]
WHOLE = "".join(f"{text}\n" for text in TEXTS)
JSONL = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9\n"


def table(separator: str) -> str:
    made = io.StringIO()
    csv.writer(made, delimiter=separator).writerows([["id", "text"], *enumerate(TEXTS)])
    return made.getvalue()


def parquet() -> bytes:
    made = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), made)
    return made.getvalue()


def tar() -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        member = tarfile.TarInfo("a.txt")
        member.size = len(WHOLE.encode())
        archive.addfile(member, io.BytesIO(WHOLE.encode()))
    return made.getvalue()


def zipped() -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("a.txt", WHOLE)
    return made.getvalue()


# Bytes, and the text that they are where a name says that they are text; None where they are none.
CONTENTS: dict[str, tuple[bytes, str | None]] = {
    "text": (WHOLE.encode(), WHOLE),
    "text with a mark": (WHOLE.encode("utf-8-sig"), WHOLE),
    "jsonl": (JSONL.encode(), JSONL),
    "csv": (table(",").encode(), table(",")),
    "tsv": (table("\t").encode(), table("\t")),
    "parquet": (parquet(), None),
    "tar": (tar(), None),
    "zip": (zipped(), None),
    "utf16": (WHOLE.encode("utf-16-le"), None),
    "utf16 with a mark": (WHOLE.encode("utf-16"), None),
    "rows in utf16": (JSONL.encode("utf-16-be"), None),
    "latin-1": (WHOLE.encode("latin-1"), None),
    "pointer": (POINTER.encode(), None),
    "truncated": (WHOLE.encode() + bytes(512), None),
    "nothing": (b"", ""),
}
PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".GZ": gzip.compress,
    ".zst": zstandard.compress,
    ".zstd": zstandard.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
}
ENDINGS = ["", ".txt", ".md", ".jsonl", ".JSON", ".csv", ".tsv", ".parquet", ".bin"]
READ = {
    **dict.fromkeys(("", ".txt", ".md", ".bin"), "text"),
    **{".jsonl": "jsonl", ".JSON": "jsonl", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"},
}


def outcome(*inputs: str) -> list[str] | DataError:
    """The documents; or the refusal."""
    settings = Tokenize(inputs=list(inputs))
    try:
        files = corpus.list_files(settings, Config().own_folders)
        return [text for file in files for text in corpus.read_documents(file, settings)]
    except DataError as err:
        return err


def right(ending: str, content: str) -> list[str] | None:
    """The documents that a file is; None where it must be refused."""
    _, text = CONTENTS[content]
    if content == "nothing":
        return None if ending == ".parquet" else []
    if READ[ending] == "text":
        return None if text is None else [text]
    return TEXTS if READ[ending] == content else None


def hold(found: list[str] | DataError, wanted: list[str] | None, named: str, what: object) -> str:
    if isinstance(found, DataError):
        assert named in found.what and found.fix, (what, str(found))
        assert wanted is None, (what, str(found))
        return "refused"
    assert found == wanted, (what, found)
    return "right"


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_each_ending_packing_and_content_gives_the_texts_or_is_refused_by_name() -> None:
    ends = Counter[str]()
    for ending in ENDINGS:
        for packing, pack in PACKINGS.items():
            for content, (data, _) in CONTENTS.items():
                path = Path(f"in/a{ending}{packing}")
                path.parent.mkdir()
                path.write_bytes(pack(data))
                wanted = right(ending, content)
                # xz and bzip2 are not read, nor parquet that is packed a second time.
                if packing in (".xz", ".bz2") or (packing and ending == ".parquet"):
                    wanted = None
                ends[hold(outcome("in"), wanted, str(path), (path.name, content))] += 1
                shutil.rmtree("in")
    assert ends.total() == len(ENDINGS) * len(PACKINGS) * len(CONTENTS) and min(ends.values()) > 100


def test_bytes_under_an_ending_of_another_packing_are_refused_by_name() -> None:
    ends = Counter[str]()
    for named in PACKINGS:
        for packing, pack in PACKINGS.items():
            path = Path(f"a.txt{named}")
            path.write_bytes(pack(WHOLE.encode()))
            alike = named.lower()[:4] == packing.lower()[:4] and packing not in (".xz", ".bz2")
            plain = named in (".xz", ".bz2") and not packing  # text by its bytes
            wanted = [WHOLE] if alike or plain else None
            ends[hold(outcome(path.name), wanted, path.name, (named, packing))] += 1
    assert ends == {"right": 11, "refused": 38}


def shapes(name: str) -> Iterator[tuple[str, list[str], bool]]:
    """What is beside the file in/NAME; the inputs; whether that changes nothing."""
    has_rows = READ[Path(name).suffix] != "text"
    says_text = name.endswith(".txt")
    yield "alone", ["in"], True
    yield "by itself", [f"in/{name}"], True
    yield "twice", ["in", f"in/{name}", "in/*", "./in"], True
    yield "hidden files", ["in"], True
    yield "a link", ["in"], True
    yield "a hard link", ["in"], True
    yield "a link of another ending", ["in"], False
    yield "README.md", ["in"], not has_rows
    yield "rows", ["in"], has_rows or says_text
    yield "Forge's own", ["."], True
    yield "a cache of a hub", ["in"], False


def beside(shape: str, path: Path) -> list[str]:
    """Make what is beside the file; the texts of it."""
    match shape:
        case "hidden files":
            (path.parent / ".gitattributes").write_text("*.parquet filter=lfs\n")
        case "a link":
            (path.parent / f"z{path.suffix}").symlink_to(path.name)
        case "a hard link":
            os.link(path, path.parent / f"z{path.suffix}")
        case "a link of another ending":
            (
                path.parent / "z.ndjson"
                if path.suffix in ("", ".txt", ".md", ".bin")
                else path.parent / "z.txt"
            ).symlink_to(path.name)
        case "README.md":
            (path.parent / "README.md").write_text("about the data")
            return ["about the data"]
        case "rows":
            (path.parent / "z.jsonl").write_text('{"text": "a row"}\n')
            return ["a row"]
        case "Forge's own":
            for folder in ("data/tokens/0123456789ab", "results/base"):
                Path(folder).mkdir(parents=True, exist_ok=True)
                Path(folder, "manifest.json").write_text("{}\n")
        case "a cache of a hub":
            for folder in ("in/blobs", "in/snapshots/c0ffee"):
                Path(folder).mkdir(parents=True)
            path.rename("in/blobs/b10b")
            Path(f"in/snapshots/c0ffee/{path.name}").symlink_to("../../blobs/b10b")
    return []


def test_what_is_beside_a_file_changes_nothing_or_is_refused_by_name() -> None:
    ends = Counter[str]()
    for ending in ENDINGS:
        content = READ[ending]
        for shape, inputs, is_right in shapes(f"m{ending}"):
            path = Path(f"in/m{ending}")
            path.parent.mkdir()
            path.write_bytes(CONTENTS[content][0])
            more = beside(shape, path)
            own = right(ending, content) or []
            wanted = (more + own if shape == "README.md" else own + more) if is_right else None
            ends[hold(outcome(*inputs), wanted, "in", (shape, ending))] += 1
            shutil.rmtree("in")
    assert ends.total() == 99 and ends["refused"] == 9 + 9 + 5 + 3
