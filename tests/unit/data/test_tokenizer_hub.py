"""The real hub client against a loopback server that speaks the hub's file protocol.

Every build runs in a process of its own: the client reads HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE
when it is imported. Stands against: a compute node that waits for a network it does not have, and
a tokenizer that changes upstream between two runs.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hub import COMMIT, Hub, served
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

BUILD = """
import sys
from forge.core.config import Config
from forge.core.errors import ForgeError
from forge.data.content_ids import resolve
from forge.data.tokenizer import build_tokenizer
try:
    print(build_tokenizer(resolve(Config.model_validate_json(sys.stdin.read()))))
except ForgeError as err:
    print(err)
    sys.exit(err.code)
"""


def byte_level() -> bytes:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate([*alphabet, "<|done|>"])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|done|>"])
    return str(tokenizer.to_str()).encode()


@pytest.fixture
def hub() -> Iterator[Hub]:
    repos = {
        "team/lossless": {
            "tokenizer.json": byte_level(),
            "tokenizer_config.json": b'{"eos_token": {"content": "<|done|>"}}',
            "model.safetensors": b"many gigabytes",
        },
        "team/plain": {"tokenizer.json": byte_level()},
        "team/old": {"spiece.model": b"sentencepiece"},
    }
    with served(repos) as hub:
        yield hub


def build(
    tmp_path: Path, hub: Hub, name: str, data: str = "data", home: str = "home", **env: str
) -> tuple[int, str]:
    """Exit code and output of a build in a fresh process."""
    (tmp_path / "corpus.txt").write_text("text")
    config = {
        "data": str(tmp_path / data),
        "tokenizer": {"source": "hub", "hub": name},
        "tokenize": {"inputs": [str(tmp_path / "corpus.txt")]},
    }
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", BUILD],
        input=json.dumps(config),
        env=inherited | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / home)} | env,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    return done.returncode, done.stdout + done.stderr


def manifest(tmp_path: Path, data: str = "data") -> dict[str, object]:
    (path,) = (tmp_path / data / "tokenizers").glob("*/manifest.json")
    return dict(json.loads(path.read_text()))


def test_only_the_tokenizers_files_are_fetched_then_it_works_offline(
    tmp_path: Path, hub: Hub
) -> None:
    code, output = build(tmp_path, hub, "team/lossless@main")
    assert code == 0, output
    facts = manifest(tmp_path)
    assert (facts["commit"], facts["eos_token"], facts["vocab_size"]) == (COMMIT, "<|done|>", 257)
    files = {path.rsplit("/", 1)[1] for path in hub.asked if "/resolve/" in path}
    assert files == {"tokenizer.json", "tokenizer_config.json"}

    hub.asked.clear()
    code, output = build(tmp_path, hub, "team/lossless@main", data="two", HF_HUB_OFFLINE="1")
    assert code == 0, output
    assert manifest(tmp_path, "two") == facts
    assert hub.asked == []


def test_a_repository_without_tokenizer_config_works_offline_too(tmp_path: Path, hub: Hub) -> None:
    hub.repos["team/plain"]["tokenizer.json"] = byte_level().replace(b"<|done|>", b"</s>")
    for data, offline in (("one", "0"), ("two", "1")):
        code, output = build(tmp_path, hub, "team/plain@main", data=data, HF_HUB_OFFLINE=offline)
        assert code == 0, output
        assert manifest(tmp_path, data)["eos_token"] == "</s>"


def test_eos_is_named_by_the_other_files_of_the_repository(tmp_path: Path, hub: Hub) -> None:
    hub.repos["team/plain"] |= {
        "tokenizer.json": byte_level().replace(b"<|done|>", b"[STOP]"),
        "config.json": b'{"eos_token_id": 256}',
    }
    for data, offline in (("one", "0"), ("two", "1")):
        code, output = build(tmp_path, hub, "team/plain@main", data=data, HF_HUB_OFFLINE=offline)
        assert code == 0, output
        facts = manifest(tmp_path, data)
        assert (facts["eos_token"], facts["eos_token_from"]) == ("[STOP]", "config.json")


def test_offline_and_not_cached_is_69_with_the_command_to_run(tmp_path: Path, hub: Hub) -> None:
    code, output = build(tmp_path, hub, "team/lossless@main", HF_HUB_OFFLINE="1")
    assert code == 69
    assert (
        "forge tokenizer CONFIG --tokenizer.source=hub --tokenizer.hub=team/lossless@main" in output
    )
    assert hub.asked == []


def test_a_file_that_is_missing_in_the_cache_is_not_taken_for_absent(
    tmp_path: Path, hub: Hub
) -> None:
    build(tmp_path, hub, "team/lossless@main")
    (cached,) = (tmp_path / "home").glob("hub/*/snapshots/*/tokenizer_config.json")
    cached.unlink()
    code, output = build(tmp_path, hub, "team/lossless@main", data="two", HF_HUB_OFFLINE="1")
    assert code == 69, output
    assert "cannot get tokenizer_config.json" in output


def test_an_unknown_revision_is_a_config_error(tmp_path: Path, hub: Hub) -> None:
    code, output = build(tmp_path, hub, "team/lossless@v9")
    assert code == 78
    assert "team/lossless has no revision 'v9'" in output


def test_an_unknown_repository_is_a_config_error(tmp_path: Path, hub: Hub) -> None:
    code, output = build(tmp_path, hub, "team/lossles@main")
    assert code == 78
    assert "there is no repository team/lossles" in output


def test_a_repository_without_tokenizer_json_is_a_config_error(tmp_path: Path, hub: Hub) -> None:
    code, output = build(tmp_path, hub, "team/old@main")
    assert code == 78
    assert "team/old@main has no tokenizer.json" in output
