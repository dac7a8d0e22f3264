"""Inputs of another program and of a corpus from a hub: the real client against a server on the loopback
interface."""

import os
import subprocess
import sys

import pytest
import yaml
from support.bert_hub import repositories
from support.hub import COMMIT, served
from support.live_run import forge
from support.repository import REPOSITORY

from forge.core.config import Config, checked
from forge.core.errors import ConfigError, DataError
from forge.core.files import digest_bytes
from forge.data.content_ids import resolve
from forge.data.hub import HubFiles
from forge.data.inputs import InputSet, corpus_files
from forge.data.shards import ShardSet

LAB = REPOSITORY / "config/labs/bert-cpu"
BERT = "hf://google/tiny-bert@main"
NEWS = "hf://datasets/team/news@main"


@pytest.fixture
def hub():
    repos = {
        "google/tiny-bert": {"vocab.txt": b"[PAD]\n[UNK]\n", "config.json": b"{}"},
        "datasets/team/news": {
            "data/train-0.parquet": b"one",
            "data/train-1.parquet": b"two",
            "README.md": b"# News",
        },
        "datasets/team/texts": {
            f"en/{part}.jsonl": "".join(
                f'{{"text": "document {line} of {part}"}}\n' for line in range(20)
            ).encode()
            for part in ("a", "b")
        },
        "datasets/team/clone": {
            ".gitattributes": b"*.parquet filter=lfs\n",
            "README.md": b"# Texts",
            "train.csv": b"text\n" + b"".join(b"row %d\n" % n for n in range(20)),
        },
    }
    with served(repos) as hub:
        yield hub


@pytest.fixture
def forge_inputs(hub, tmp_path):
    """forge_inputs([URL, …]): exit code and output of `forge inputs`, in a process of its own: the client
    reads its variables when it is imported."""

    def run(inputs, *, corpus=False, **env):
        config = tmp_path / "config.yaml"
        of_program = {"program": {"command": ["x"], "inputs": inputs}}
        values = of_corpus(inputs) if corpus else of_program
        config.write_text(yaml.safe_dump({"data": str(tmp_path / "data"), **values}))
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        done = subprocess.run(
            [sys.executable, "-m", "forge", "inputs", str(config)],
            env=inherited | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")} | env,
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        return done.returncode, done.stdout + done.stderr

    return run


def of_corpus(inputs):
    """The sections of a config that trains on a corpus."""
    return {
        "tokenizer": {"vocab_size": 300},
        "tokenize": {"inputs": inputs, "val_fraction": 0.4},
    }


def made(tmp_path):
    [manifest] = (tmp_path / "data/inputs").glob("*/manifest.json")
    return InputSet.open(manifest.parent)


def test_files_and_globs_of_models_and_data_sets_are_downloaded_with_their_commit(
    forge_inputs, tmp_path, hub
):
    (tmp_path / "labels.txt").write_text("world")
    local = str(tmp_path / "labels.txt")
    code, output = forge_inputs([local, f"{BERT}/vocab.txt", f"{NEWS}/data/*.parquet"])
    assert code == 0, output
    found = made(tmp_path)
    assert (found.data, [entry.name for entry in found.manifest.files]) == (
        str(tmp_path),
        ["labels.txt"],
    )
    assert {entry.name: entry.digest for entry in found.manifest.downloads} == {
        "datasets/team/news/data/train-0.parquet": digest_bytes(b"one"),
        "datasets/team/news/data/train-1.parquet": digest_bytes(b"two"),
        "google/tiny-bert/vocab.txt": digest_bytes(b"[PAD]\n[UNK]\n"),
    }
    assert found.manifest.commits == {
        "google/tiny-bert@main": COMMIT,
        "datasets/team/news@main": COMMIT,
    }
    assert all(member.path.is_file() for member in found.members)
    hub.asked.clear()
    code, output = forge_inputs([local, f"{BERT}/vocab.txt", f"{NEWS}/data/*.parquet"])
    assert (code, "nothing to do" in output, hub.asked) == (0, True, [])


def test_without_a_file_name_the_whole_repository_is_meant(forge_inputs, tmp_path):
    code, output = forge_inputs([BERT])
    assert code == 0, output
    names = [entry.name for entry in made(tmp_path).manifest.downloads]
    assert names == ["google/tiny-bert/config.json", "google/tiny-bert/vocab.txt"]


def test_downloads_of_a_project_that_was_moved_are_read_where_they_are_now(forge_inputs, tmp_path):
    code, output = forge_inputs([BERT])
    assert code == 0, output
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    (tmp_path / "data").rename(moved / "data")
    found = made(moved)
    assert found.hub.startswith(str(moved))
    assert all(member.path.is_file() for member in found.members)


def test_named_files_come_from_the_cache_without_network_and_a_glob_is_never_guessed(
    forge_inputs, tmp_path, hub
):
    assert forge_inputs([f"{NEWS}/data/train-0.parquet"])[0] == 0
    [folder] = (tmp_path / "data/inputs").iterdir()
    (folder / "manifest.json").unlink()
    hub.asked.clear()
    code, output = forge_inputs([f"{NEWS}/data/train-0.parquet"], HF_HUB_OFFLINE="1")
    assert (code, hub.asked) == (0, []), output
    # One of two files is in the cache: it must not pass for all of them.
    code, output = forge_inputs([f"{NEWS}/data/*.parquet"], HF_HUB_OFFLINE="1")
    assert code == 69, output
    assert "cannot get data/*.parquet of datasets/team/news@main" in output
    assert "on a login node: forge inputs CONFIG" in output


def test_lab_asks_no_hub_where_the_cache_has_its_files(forge_inputs, tmp_path, hub):
    hub.repos |= repositories(rows=20)
    inputs = yaml.safe_load((LAB / "config.yaml").read_text())["program"]["inputs"]
    assert forge_inputs(inputs)[0] == 0
    [folder] = (tmp_path / "data/inputs").iterdir()
    (folder / "manifest.json").unlink()
    hub.asked.clear()
    code, output = forge_inputs(inputs, HF_HUB_OFFLINE="1")
    assert (code, hub.asked) == (0, []), output


@pytest.mark.parametrize(
    ("url", "code", "message"),
    [
        (f"{BERT}/vocab.json", 65, "google/tiny-bert@main has no file 'vocab.json'"),
        (f"{NEWS}/data/*.csv", 65, "no file of datasets/team/news@main matches 'data/*.csv'"),
        ("hf://datasets/team/newz@main/*", 78, "there is no repository datasets/team/newz"),
        (f"{BERT.replace('main', 'v9')}/vocab.txt", 78, "google/tiny-bert has no revision 'v9'"),
    ],
)
def test_what_the_hub_does_not_have_is_named(forge_inputs, url, code, message):
    found, output = forge_inputs([url])
    assert (found, message in output) == (code, True), output


@pytest.mark.parametrize("url", ["hf://google/tiny-bert/vocab.txt", "hf://bert@main/x", "hf://"])
def test_url_without_owner_or_revision_is_refused_before_anything_is_asked(url):
    values = {"program": {"command": ["x"], "inputs": [url]}}
    with pytest.raises(ConfigError, match="names no files of the hub"):
        resolve(checked(Config, values, "config.yaml"))


@pytest.mark.parametrize("section", ["program", "tokenize"])
def test_two_revisions_of_a_repository_are_refused_before_one_replaces_the_other(section):
    inputs = ["hf://datasets/a/b@v1/x.jsonl", "hf://a/b@v2/x.jsonl", "hf://datasets/a/b@v2/x.jsonl"]
    values = {section: {"inputs": inputs, **({"command": ["x"]} if section == "program" else {})}}
    with pytest.raises(ConfigError) as raised:
        resolve(checked(Config, values, "config.yaml"))
    assert raised.value.what == (
        f"{section}.inputs has two revisions of a repository: datasets/a/b@v1 and datasets/a/b@v2"
    )
    assert ("tokenize.sources" in raised.value.fix) == (section == "tokenize")


def test_revision_may_be_the_hubs_own_conversion_to_parquet():
    found = HubFiles.parse("hf://datasets/a/b@refs/convert/parquet/default/train/0.parquet")
    assert (found.repo.revision, found.pattern) == (
        "refs/convert/parquet",
        "default/train/0.parquet",
    )


# --- of a corpus --------------------------------------------------------------------------------

TEXTS = "hf://datasets/team/texts@main"


def test_corpus_from_a_hub_is_downloaded_by_its_own_step_and_then_read_offline(
    forge_inputs, tmp_path, hub, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "more.txt").write_text("a local document")
    inputs = ["more.txt", f"{TEXTS}/en/*.jsonl"]
    code, output = forge_inputs(inputs, corpus=True, HF_HUB_OFFLINE="1")
    assert code == 69, output
    assert "on a login node: forge inputs CONFIG" in output
    for step in ("tokenizer", "tokenize"):
        outcome = forge(step, "config.yaml")
        assert outcome.code == 65
    assert "there is no tokenizer" in outcome.text

    code, output = forge_inputs(inputs, corpus=True)
    assert code == 0, output
    assert f"2 files of datasets/team/texts@main, commit {COMMIT}" in output
    assert [entry.name for entry in made(tmp_path).manifest.files] == []
    assert made(tmp_path).manifest.commits == {"datasets/team/texts@main": COMMIT}
    hub.asked.clear()
    for step in ("tokenizer", "tokenize"):
        outcome = forge(step, "config.yaml")
        assert outcome.code == 0, outcome.text
    assert hub.asked == []
    [manifest] = (tmp_path / "data/tokens").glob("*/manifest.json")
    shards = ShardSet.open(manifest.parent).manifest
    assert [entry.name for entry in shards.inputs] == [
        "hf://datasets/team/texts/en/a.jsonl",
        "hf://datasets/team/texts/en/b.jsonl",
        "more.txt",
    ]
    assert sum(total.documents for total in shards.totals.values()) == 41


def test_what_a_repository_has_about_its_data_is_no_text_of_a_corpus(
    forge_inputs, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    clone = "hf://datasets/team/clone@main"
    code, output = forge_inputs([clone], corpus=True)
    assert code == 65 and "has train.csv, and README.md, which would be read as text" in output
    assert f"by its endings: {clone}/*.csv" in output
    assert not list((tmp_path / "data").glob("inputs/*/hub"))  # nothing was downloaded
    for inputs in ([f"{clone}/*.csv"], [f"{clone}/[.t]*"]):
        assert forge_inputs(inputs, corpus=True)[0] == 0
        config = resolve(checked(Config, of_corpus(inputs), "config.yaml"))
        assert [file.name for file in corpus_files(config)] == [
            "hf://datasets/team/clone/train.csv"
        ]


def test_without_its_download_a_corpus_names_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = resolve(checked(Config, of_corpus([f"{TEXTS}/en/*.jsonl"]), "config.yaml"))
    with pytest.raises(DataError, match="are not in data/inputs/") as refused:
        corpus_files(config)
    assert refused.value.fix == "on a login node: forge inputs CONFIG"


def test_url_of_a_corpus_is_part_of_its_ids_and_named_by_its_key(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "more.txt").write_text("a local document")

    def ids_of(*inputs):
        return resolve(checked(Config, of_corpus(list(inputs)), "config.yaml")).ids

    main, other = ids_of("more.txt", f"{TEXTS}/en/*"), ids_of("more.txt", f"{TEXTS}/de/*")
    local = ids_of("more.txt")
    assert len({main.tokens, other.tokens, local.tokens}) == 3
    assert main.inputs and other.inputs and local.inputs == ""
    with pytest.raises(ConfigError, match=r"tokenize\.inputs has 'hf://team/texts/a\.jsonl'"):
        ids_of("hf://team/texts/a.jsonl")
