"""Token sets of each reading keep their ids, their bytes and their use: nothing is tokenized again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
from support.clone import Project
from support.live_run import forge
from support.past import Past, digest, flip_a_bit

from forge.core.config import Config, checked, read_values
from forge.core.errors import DataError
from forge.data.content_ids import resolve_ids
from forge.data.sources import open_tokens

READINGS = ("text", "jsonl", "parquet", "replaced", "nanogpt", "megatron", "dolma", "sources")


def digests(folder: Path) -> dict[str, str]:
    return {str(path): digest(path) for path in folder.rglob("*") if path.is_file()}


def times_of_shards(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*.bin")}


@pytest.mark.parametrize("reading", READINGS)
def test_config_gives_the_recorded_ids(past: Past, reading: str):
    file = f"config/{reading}.yaml"
    with contextlib.chdir(past.folder / "tokens"):
        ids = resolve_ids(checked(Config, read_values(file), file))
    found = {name: value for name, value in ids.model_dump().items() if value}
    assert found == past.recorded["tokens"][reading]["ids"]


@pytest.mark.parametrize("reading", READINGS)
def test_tokens_open_with_all_their_digests(past: Past, reading: str):
    recorded, root = past.recorded["tokens"][reading], past.folder / "tokens"
    tokens = open_tokens(root / "data/tokens" / recorded["ids"]["tokens"])
    tokens.verify()
    found = {name: digest(root / name) for name in recorded["manifests"]}
    assert found == recorded["manifests"] and found


@pytest.mark.parametrize("reading", READINGS)
def test_nothing_is_tokenized_again(
    project_of: Callable[[str], Project], reading: str, capsys: pytest.CaptureFixture[str]
):
    root = project_of("tokens").root
    before, times = digests(root / "data"), times_of_shards(root / "data")
    with contextlib.chdir(root):
        for verb in ("tokenizer", "tokenize"):
            done = forge(verb, f"config/{reading}.yaml")
            assert done.code == 0 and "nothing to do" in done.text, done.text
    assert digests(root / "data") == before
    assert times_of_shards(root / "data") == times


@pytest.mark.parametrize("reading", READINGS)
def test_the_same_texts_give_the_same_tokens(
    project_of: Callable[[str], Project], past: Past, reading: str
):
    """Made again, without gigatoken or with it, they are the recorded ones."""
    project, recorded = project_of("tokens"), past.recorded["tokens"][reading]
    (project.root / "data").rename(project.root / "then")
    with contextlib.chdir(project.root):
        for verb in ("tokenizer", "tokenize"):
            done = forge(verb, f"config/{reading}.yaml")
            assert done.code == 0, done.text
    found = {name: digest(project.root / name) for name in recorded["manifests"]}
    assert found == recorded["manifests"]


def test_flipped_bit_of_a_shard_is_noticed(project_of: Callable[[str], Project], past: Past):
    root, ids = project_of("tokens").root, past.recorded["tokens"]["text"]["ids"]
    folder = root / "data/tokens" / ids["tokens"]
    [shard] = folder.glob("val-*.bin")
    flip_a_bit(shard)
    with pytest.raises(DataError, match=shard.name):
        open_tokens(folder).verify()
