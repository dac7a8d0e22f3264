"""Against a source that is tokenized twice, under another id than alone, or mistaken for another one."""

from __future__ import annotations

import shutil
from contextlib import chdir
from pathlib import Path

import pytest

from forge.core.config import Config, checked
from forge.core.errors import DataError
from forge.core.paths import MANIFEST, tokens_folder
from forge.data.content_ids import corpus_config, resolve
from forge.data.shards import ShardSet
from forge.data.sources import list_sources, open_tokens
from forge.data.tokenize import tokenize
from forge.data.tokenizer import build_tokenizer

FILE = "tokenizer.json"
OF_FILE = {"source": "path", "path": FILE}
READ = {"code": {"document_separator": "\n"}, "web": {}}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two corpora, a tokenizer's file, and their tokens."""
    folder = tmp_path_factory.mktemp("made")
    with chdir(folder):
        for name in READ:
            Path(name).mkdir()
            for number in range(8):
                words = (f"{name} {number} {word}\n" for word in range(40))
                Path(name, f"{number}.txt").write_text("".join(words))
        trained = resolve(config_of({"web": {"inputs": ["web"]}}))
        shutil.copy(build_tokenizer(trained) / "tokenizer.json", FILE)
        config = resolve(both(**OF_FILE))
        build_tokenizer(config)
        for name in config.ids.sources:
            tokenize(corpus_config(config, name), workers=1)
    return folder, config


@pytest.fixture
def project(made, tmp_path, monkeypatch):
    """A copy of it as the current directory."""
    shutil.copytree(made[0], tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")


@pytest.fixture
def tokenized(made, project):
    return made[1]


def config_of(sources=None, source="train", path=None, mix=None, **corpus):
    values = {
        "tokenizer": {"source": source, "vocab_size": 300, "path": path},
        "tokenize": {"val_fraction": 0.3, **(corpus or {"sources": sources})},
        "train": {"mix": mix},
    }
    return checked(Config, values, "the test")


def both(**values):
    return config_of({name: {"inputs": [name], **keys} for name, keys in READ.items()}, **values)


def test_source_has_the_id_that_it_has_alone(project):
    together = resolve(both(**OF_FILE)).ids
    for name, keys in READ.items():
        alone = resolve(config_of(**OF_FILE, inputs=[name], **keys)).ids
        assert (alone.tokenizer, alone.tokens) == (together.tokenizer, together.sources[name])


def test_weights_change_no_id_and_a_new_source_none_of_the_others(project):
    ids = resolve(both(**OF_FILE)).ids
    assert resolve(both(**OF_FILE, mix={"web": 1, "code": 5})).ids == ids
    fewer = resolve(config_of({"web": {"inputs": ["web"]}}, **OF_FILE)).ids
    assert fewer.sources == {"web": ids.sources["web"]}
    assert fewer.tokens != ids.tokens


def test_trained_tokenizer_depends_on_all_sources_and_on_how_each_is_read(project):
    ids = resolve(both())
    Path("code/0.txt").write_text("longer " * 99)
    # Listings are cached by their inputs in a process.
    other = resolve(config_of({"web": {"inputs": ["web"]}, "code": {"inputs": ["./code"]}}))
    assert other.ids.tokenizer != ids.ids.tokenizer
    assert other.ids.sources["web"] != ids.ids.sources["web"], "it has another tokenizer"


def test_list_of_sources_opens_as_their_shards(tokenized):
    folder = list_sources(tokenized)
    before = (folder / MANIFEST).read_bytes()
    tokens = open_tokens(folder)
    assert list(tokens.by_source) == ["code", "web"]
    assert list_sources(tokenized) == folder
    assert (folder / MANIFEST).read_bytes() == before
    tokens.verify()
    assert len(tokens.members) == sum(len(one.members) + 1 for one in tokens.by_source.values())
    alone = tokens_folder(tokenized.data, tokenized.ids.sources["web"])
    assert isinstance(open_tokens(alone), ShardSet)
    assert open_tokens(alone) == tokens.by_source["web"]


def test_every_shard_is_verified_by_one_of_several_readers(tokenized):
    tokens = open_tokens(list_sources(tokenized))
    shard = tokens.by_source["web"].train[0].path
    shard.write_bytes(bytes(shard.stat().st_size))
    failed = 0
    for reader in range(2):
        try:
            tokens.verify((reader, 2))
        except DataError as err:
            assert shard.name in err.what
            failed += 1
    assert failed == 1


def test_source_that_is_missing_is_named_by_its_place(tokenized):
    place = tokens_folder(tokenized.data, tokenized.ids.sources["code"])
    (place / MANIFEST).unlink()
    with pytest.raises(DataError, match=place.name):
        list_sources(tokenized)


def test_sources_of_different_tokenizers_are_refused(tokenized):
    folder = list_sources(tokenized)
    path = tokens_folder(tokenized.data, tokenized.ids.sources["code"]) / MANIFEST
    then = open_tokens(folder).tokenizer_digest
    path.write_text(path.read_text().replace(then, "0" * 64))
    with pytest.raises(DataError, match=r"source code in .* have digest"):
        open_tokens(folder)
    list_sources(tokenized)
    with pytest.raises(DataError, match="made with different tokenizers"):
        open_tokens(folder)


def test_list_cannot_lead_out_of_the_directory(tokenized):
    folder = list_sources(tokenized)
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text.replace(tokenized.ids.sources["code"], "../elsewhere"))
    with pytest.raises(DataError, match=r"sources\.code\.id"):
        open_tokens(folder)


def test_source_without_files_is_named_by_its_key(project):
    with pytest.raises(
        DataError, match=r"tokenize\.sources\.web\.inputs: 'nowhere/\*' matches no files"
    ):
        resolve(config_of({"web": {"inputs": ["nowhere/*"]}}))
