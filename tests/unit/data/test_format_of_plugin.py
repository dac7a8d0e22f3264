"""A text format of a project's plugin, by the example WET. Threats: tokens of an edited reader under the
old id, a job that reads by other code than it was submitted with, a stranger's files that import code, a
cut file that is read as a whole one, and a fault of the plugin that is told as one of Forge."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import blake3
import pytest
from support.project_plugin import fresh_process
from support.repository import REPOSITORY
from support.wet import packed, record, records, wet_gz
from test_lossy_tokenizer import documents, of_ascii

from forge.core import hooks, project_plugins
from forge.core.config import Config, ResolvedConfig, checked, load_config
from forge.core.errors import ConfigError, DataError
from forge.core.files import digest_file
from forge.data import content_ids, corpus
from forge.data.content_ids import resolve
from forge.data.shards import ShardManifest, ShardSet
from forge.data.statistics import read_statistics
from forge.data.tokenize import tokenize
from forge.data.tokenizer import build_tokenizer

TEXTS = ["A page.\nIts second line.", "ü 世界 🙂", " spaces \r\n\r\nWARC/1.0\r\n", "ab" * 300]
MANY = [f"page {number} " + "word " * number for number in range(40)]


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project with the plugin of the example, in which no plugin was used yet."""
    monkeypatch.chdir(tmp_path)
    content_ids._cached_listing_digest.cache_clear()
    shutil.copytree(REPOSITORY / "examples/plugins/wet", tmp_path / "plugins/wet")
    (tmp_path / "crawl").mkdir()
    (tmp_path / "crawl/a.warc.wet.gz").write_bytes(wet_gz(MANY))
    with fresh_process():
        yield tmp_path


def load(plugins: tuple[str, ...] = ("plugins/wet",), **settings: object) -> Config:
    """A config of the project, read anew."""
    values = {"inputs": ["crawl"], "format": "wet", "val_fraction": 0.2, **settings}
    file = {"plugins": plugins, "tokenizer": {"vocab_size": 300}, "tokenize": values}
    Path("config.yaml").write_text(json.dumps(file))
    return load_config("config.yaml")


def edit() -> None:
    path = Path("plugins/wet/reader.py")
    path.write_text(path.read_text().replace("wanted = int(", "wanted = +int("))


def read(name: str, hasher: blake3.blake3 | None = None, **settings: object) -> list[str]:
    chosen = load(inputs=[name], **settings).tokenize
    [file] = corpus.list_files(chosen)
    return list(corpus.read_documents(file, chosen, hasher=hasher))


def written(name: str, data: bytes) -> str:
    Path(name).write_bytes(data)
    return name


# --- ids and records ------------------------------------------------------------------------------


def test_config_has_the_digest_of_the_format_and_the_run_is_not_bound_to_it() -> None:
    config = resolve(load())
    digest = project_plugins.used()["wet"]
    assert config.tokenize.format == f"wet@wet:{digest}"
    assert config.to_json()["tokenize"]["format"] == config.tokenize.format
    assert "plugins" not in config.to_json()["ids"]


def test_edited_format_gives_other_ids_and_a_built_in_one_keeps_its_own() -> None:
    text = {"format": "text", "inputs": ["config.yaml"]}
    with fresh_process():
        first, alone = resolve(load()).ids, resolve(load(plugins=(), **text)).ids
    with fresh_process():
        again, beside = resolve(load()).ids, resolve(load(plugins=(), **text)).ids
    edit()
    with fresh_process():
        edited, after = resolve(load()).ids, resolve(load(plugins=(), **text)).ids
    assert first == again and alone == beside == after
    assert first.tokens != edited.tokens and first.tokenizer != edited.tokenizer


def test_recorded_config_is_read_without_an_import_and_without_the_plugin() -> None:
    """As of somebody else, or by a rank: only who reads text needs the format."""
    values = resolve(load()).to_json()
    shutil.rmtree(project_plugins.COPIES)
    with fresh_process():
        config = checked(ResolvedConfig, values, "gift/config.json")
        assert config.to_json() == values
        assert project_plugins.used() == {} and hooks.text_formats() == {}


def test_text_of_somebody_elses_config_is_refused_by_name_and_digest(project: Path) -> None:
    values = resolve(load()).to_json()
    digest = project_plugins.used()["wet"]
    shutil.rmtree(project_plugins.COPIES)
    (project / "config").mkdir()
    with fresh_process():
        config = checked(ResolvedConfig, values, "gift/config.json")
        message = rf"format wet was made with the plugin wet \(digest {digest[:12]}\), which this"
        with pytest.raises(ConfigError, match=message):
            build_tokenizer(config)
        assert project_plugins.used() == {}
        # As a new clone, whose config names the plugin.
        (project / "config/config.yaml").write_text("plugins: [plugins/wet]\n")
        build_tokenizer(config)
        assert project_plugins.used() == {"wet": digest}


@pytest.mark.parametrize("digest", ["../../gift", "e" * 63, "E" * 64, ""])
def test_digest_that_is_a_path_is_no_format(digest: str) -> None:
    with pytest.raises(ConfigError, match="must be one of auto, text"):
        load(format=f"wet@wet:{digest}")


def test_format_that_the_recorded_plugin_does_not_have_is_refused() -> None:
    other = load().tokenize.format.replace("wet@", "warc@")
    with pytest.raises(ConfigError, match=r"plugin wet .* has no text format warc"):
        corpus.import_plugin(load(format=other).tokenize)


def test_unknown_format_is_refused_with_those_of_plugins() -> None:
    with pytest.raises(ConfigError, match=r"format is 'warc': must be one of auto, text, .* wet"):
        load(format="warc")


def test_each_source_has_its_own_format() -> None:
    Path("notes").mkdir()
    Path("notes/a.txt").write_text("one")
    sources = {"web": {"inputs": ["crawl"], "format": "wet"}, "notes": {"inputs": ["notes"]}}
    values = {"plugins": ["plugins/wet"], "tokenize": {"sources": sources}}
    Path("config.yaml").write_text(json.dumps(values))
    ids = resolve(load_config("config.yaml")).ids
    edit()
    with fresh_process():
        edited = resolve(load_config("config.yaml")).ids
    assert ids.sources["web"] != edited.sources["web"]
    assert ids.tokenizer != edited.tokenizer  # it is trained on both


def test_plugin_of_one_file_has_its_reader_beside_its_hooks() -> None:
    parts = [Path(f"plugins/wet/{name}.py").read_text() for name in ("hooks", "reader")]
    text = "\n".join(parts).replace("from __future__ import annotations\n", "")
    one = text.replace('module=f"{__package__}.reader"', "module=__name__")
    Path("plugins/crawl.py").write_text(one)
    chosen = load(("plugins/crawl.py",)).tokenize
    assert chosen.format == f"wet@crawl:{project_plugins.used()['crawl']}"
    [file] = corpus.list_files(chosen)
    assert list(corpus.read_documents(file, chosen)) == MANY


# --- tokens ---------------------------------------------------------------------------------------


def test_waiting_job_reads_by_the_copy_of_its_digest() -> None:
    """The plugin is edited while the job of `forge tokenize` waits; its manifest has the digest."""
    config = resolve(load())
    Path("data.json").write_text(json.dumps(config.to_json()))
    Path("plugins/wet/reader.py").write_text("raise SystemExit(3)")
    with fresh_process():
        job = resolve(load_config("data.json"))
        build_tokenizer(job)
        folder = tokenize(job, workers=2)
        manifest = ShardManifest.read(folder / "manifest.json")
        assert manifest.settings["format"] == config.tokenize.format
        assert sum(total.documents for total in manifest.totals.values()) == len(MANY)
        assert tokenize(job, workers=2) == folder
    with fresh_process():
        ShardSet.open(folder).verify()  # imports nothing
        assert project_plugins.used() == {}


def test_tokens_and_lost_text_are_those_of_the_same_documents_in_a_built_in_format() -> None:
    of_ascii().save("used.json")
    texts = documents(200, 5)
    Path("crawl/a.warc.wet.gz").write_bytes(wet_gz(texts))
    Path("rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = {"source": "path", "path": "used.json"}
    found = []
    for settings in ({}, {"inputs": ["rows.jsonl"], "format": "jsonl"}):
        config = resolve(Config(tokenizer=tokenizer, tokenize=load(**settings).tokenize))
        build_tokenizer(config)
        folder = tokenize(config, workers=2)
        found.append((read_statistics(folder), ShardManifest.read(folder / "manifest.json").splits))
    assert found[0] == found[1]
    statistics, _ = found[0]
    assert statistics.text.lost == sum(not char.isascii() for text in texts for char in text) > 0


# --- faults of a plugin ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('{"wet":', '{"jsonl":', "the name jsonl is taken"),
        ('{"wet":', '{"auto":', "the name auto is taken"),
        ('{"wet":', '{"a@b":', "a@b is .* a name of small letters"),
        ("TextFormat(", 'TextFormat((".wet",), ', "neither endings nor a mark"),
        ('module=f"{__package__}.reader"', "", "a plugin's has a module"),
        ("TextFormat(", "dict(", "wet is {'module'"),
    ],
)
def test_entry_that_a_plugin_cannot_have_is_refused(old: str, new: str, message: str) -> None:
    path = Path("plugins/wet/hooks.py")
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ConfigError, match=f"plugin wet cannot be imported: .*{message}"):
        load()
    assert hooks.text_formats() == {}


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import nothing_like_this", r"ModuleNotFoundError.*\(reader.py, line 1\)"),
        ("x = 1", "AttributeError.*documents"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_reader_that_cannot_be_imported_is_told_before_anything_is_written(
    code: str, message: str
) -> None:
    Path("plugins/wet/reader.py").write_text(code)
    config = resolve(load())
    with pytest.raises(ConfigError, match=f"reader of the format wet@wet:.* imported: {message}"):
        build_tokenizer(config)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def documents(file):\n    yield {}['no']", r"KeyError: 'no' \(reader.py, line 2\)"),
        ("def documents(file):\n    yield b'bytes'", "TypeError"),
        ("def documents(file):\n    yield 7", "AttributeError"),
        ("def documents(file):\n    return None", "TypeError"),
    ],
)
def test_fault_of_a_reader_is_told_with_file_and_line(code: str, message: str) -> None:
    Path("plugins/wet/reader.py").write_text(code)
    with pytest.raises(DataError, match=rf"(?s)cannot read .*a\.warc\.wet\.gz as wet: {message}"):
        read("crawl/a.warc.wet.gz")


# --- WET ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.warc.wet.gz", "a.warc.wet", "A.WET.GZ", "a"])
def test_each_page_is_a_document(name: str) -> None:
    parts = records(TEXTS)
    written(name, packed(parts) if name.lower().endswith("gz") else b"".join(parts))
    hasher = blake3.blake3()
    assert read(name, hasher) == TEXTS
    assert hasher.hexdigest() == digest_file(Path(name))


def test_file_that_is_cut_anywhere_is_refused_by_its_name() -> None:
    """But between two records, where what is left is a whole file."""
    members = [packed([part]) for part in records(TEXTS[:2])]
    whole = b"".join(members)
    ends = [*itertools.accumulate(map(len, members))]
    kept = {end: TEXTS[:number] for number, end in enumerate(ends)}
    for length in range(len(whole) + 1):
        written("a.warc.wet.gz", whole[:length])
        if length in kept:
            assert read("a.warc.wet.gz") == kept[length]
        else:
            with pytest.raises(DataError, match=r"a\.warc\.wet\.gz"):
                read("a.warc.wet.gz")


def test_unpacked_file_that_is_cut_anywhere_is_refused_with_the_record() -> None:
    parts = records(TEXTS[:2])
    whole = b"".join(parts)
    ends = {0, *itertools.accumulate(map(len, parts))}
    for length in sorted({*range(len(whole))} - ends):
        written("a.warc.wet", whole[:length])
        with pytest.raises(DataError, match=r"a\.warc\.wet.*record [123] \(byte offset \d+"):
            read("a.warc.wet")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b"<html>\n", "record 2 .* begins with b'<html>"),
        (record("response", b"HTTP/1.1 200 OK"), "is of the type response, and has no text"),
        (record("conversion", b"text", Content_Length="3"), "has 3 bytes by its Content-Length"),
        (record("conversion", b"text", Content_Length="-1"), "has Content-Length '-1'"),
        (record("conversion", b"text", Content_Length="9" * 18), "a text of more than 256 MiB"),
        (b"WARC/1.0\r\nno colon\r\n\r\n", "has the line b'no colon"),
        (b"WARC/1.0\r\n" + b"a: b\r\n" * 2000, "has a header of more than 1000 lines"),
    ],
)
def test_damaged_record_is_named_with_its_position(bad: bytes, message: str) -> None:
    info = records([])[0]
    written("a.warc.wet.gz", packed([info, bad]))
    with pytest.raises(
        DataError, match=rf"record 2 \(byte offset {len(info)} of its text\)"
    ) as told:
        read("a.warc.wet.gz")
    assert told.match(message)


def test_byte_that_is_not_utf8_is_named_by_its_offset_or_replaced() -> None:
    parts = records(["whole", b"a\xffb"])
    offset = b"".join(parts).index(b"\xff")
    written("a.warc.wet.gz", packed(parts))
    with pytest.raises(DataError, match=rf"is not UTF-8 at byte offset {offset} \(0xff\)"):
        read("a.warc.wet.gz")
    assert read("a.warc.wet.gz", invalid_utf8="replace") == ["whole", "a\ufffdb"]
