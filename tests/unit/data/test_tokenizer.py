"""A tokenizer that differs, or that ends documents with the wrong id, spoils all that follows."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from forge.core.config import Config, ResolvedConfig
from forge.core.errors import ConfigError, DataError, UnfitError
from forge.data import content_ids, tokenizer
from forge.data.tokenizer import PROBE, build_tokenizer, load_tokenizer

TEXT = "the cat sat on the mat, and the other cat sat on the other mat; naïve Grüße 世界\n" * 200


def trained(tmp_path: Path, text: str = TEXT, **tokenizer: Any) -> ResolvedConfig:
    (tmp_path / "corpus.txt").write_text(text)
    config = Config(
        data=str(tmp_path / "data"),
        tokenizer={"vocab_size": 280, **tokenizer},
        tokenize={"inputs": [str(tmp_path / "corpus.txt")]},
    )
    return content_ids.resolve(config)


def taken(tmp_path: Path, path: Path, **tokenizer: Any) -> ResolvedConfig:
    return trained(tmp_path, source="path", path=str(path), **tokenizer)


def word_level(path: Path, *special: str) -> Path:
    """A tokenizer.json as other projects publish them: it truncates, and is not byte-level."""
    vocab = {word: number for number, word in enumerate(["[UNK]", "the", "cat", *special])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(special))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return path


# --- train --------------------------------------------------------------------------------------


def test_any_text_comes_back(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(build_tokenizer(trained(tmp_path)))
    for text in (PROBE, "\x00\r\n\t ", "🙂 ﷽ e\u0301", "a" * 5000):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == 280
    assert tokenizer.tokenizer.id_to_token(tokenizer.eos_id) == "<|endoftext|>"


def test_text_that_spells_a_special_token_is_only_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(build_tokenizer(trained(tmp_path)))
    ids = tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == "a<|endoftext|>b"


def test_training_twice_in_other_processes_gives_equal_bytes(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    digests = []
    for threads in ("false", "true"):
        place = tmp_path / threads
        values = trained(tmp_path).to_json() | {"data": str(place)}
        config.write_text(json.dumps(values))
        code = (
            "import sys; from forge.core.config import load_config; from forge.data.tokenizer import *;"
            "config = content_ids.resolve(load_config(sys.argv[1]));"
            "print(load_tokenizer(build_tokenizer(config)).digest)"
        )
        command = [sys.executable, "-c", code, str(config)]
        env = os.environ | {"TOKENIZERS_PARALLELISM": threads}
        done = subprocess.run(command, env=env, check=True, capture_output=True)
        digests.append(done.stdout)
    assert digests[0] == digests[1] != b""


def test_a_tiny_corpus_gives_a_smaller_vocabulary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = build_tokenizer(trained(tmp_path, "ab ab"))
    assert load_tokenizer(folder).vocab_size < 280
    assert "of 280 ids" in capsys.readouterr().err


def test_the_sample_is_spread_over_all_files(tmp_path: Path) -> None:
    for number, word in enumerate(["aaaa", "bbbb", "cccc"]):
        (tmp_path / f"{number}.txt").write_text(f"{word} " * 100_000)
    config = Config(
        data=str(tmp_path / "data"),
        tokenizer={"vocab_size": 280, "sample_mib": 0.01},
        tokenize={"inputs": [str(tmp_path / "*.txt")]},
    )
    tokenizer = load_tokenizer(build_tokenizer(content_ids.resolve(config)))
    assert [len(tokenizer.encode(f" {word}")) for word in ("aaaa", "bbbb", "cccc")] == [1, 1, 1]


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no text to train a tokenizer on"):
        build_tokenizer(trained(tmp_path, " \n"))


def test_bad_bytes_in_the_sample_are_named(tmp_path: Path) -> None:
    config = trained(tmp_path)
    (tmp_path / "corpus.txt").write_bytes(b"ab\xff")
    with pytest.raises(DataError, match=r"corpus\.txt is not UTF-8 at byte offset 2"):
        build_tokenizer(config)


# --- a second run -------------------------------------------------------------------------------


def test_a_second_build_does_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = trained(tmp_path)
    folder = build_tokenizer(config)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    (tmp_path / "corpus.txt").unlink()  # not needed any more
    assert build_tokenizer(config) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert "nothing to do" in capsys.readouterr().err


def test_a_changed_tokenizer_is_refused_and_rebuilt(tmp_path: Path) -> None:
    config = trained(tmp_path)
    folder = build_tokenizer(config)
    whole = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(whole.replace(b"cat", b"dog"))
    with pytest.raises(DataError, match=r"tokenizer\.json has digest"):
        load_tokenizer(folder)
    build_tokenizer(config)
    assert (folder / "tokenizer.json").read_bytes() == whole


def test_a_missing_tokenizer_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="forge tokenizer"):
        load_tokenizer(tmp_path)


def test_inputs_that_changed_since_the_config_was_resolved_are_refused(tmp_path: Path) -> None:
    config = trained(tmp_path)
    (tmp_path / "corpus.txt").write_text(TEXT + "more")
    content_ids._cached_listing_digest.cache_clear()
    with pytest.raises(DataError, match="was resolved to tokenizer"):
        build_tokenizer(config)


# --- path ---------------------------------------------------------------------------------------


def test_a_given_tokenizer_is_used_and_never_truncates(tmp_path: Path) -> None:
    path = word_level(tmp_path / "tokenizer.json", "<eos>")
    folder = build_tokenizer(taken(tmp_path, path))
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.vocab_size, tokenizer.eos_token, tokenizer.eos_id) == (4, "<eos>", 3)
    assert len(tokenizer.encode("the cat the cat the cat")) == 6
    assert len(tokenizer.encode("the")) == 1


def test_ids_depend_on_contents_not_on_paths(tmp_path: Path) -> None:
    first = word_level(tmp_path / "a" / "tokenizer.json", "<eos>")
    second = word_level(tmp_path / "b" / "tokenizer.json", "<eos>")
    other = word_level(tmp_path / "c" / "tokenizer.json", "</s>")
    ids = [
        taken(tmp_path, path, vocab_size=size).ids.tokenizer
        for path, size in ((first, 280), (second, 4096), (other, 280))
    ]
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.parametrize("named", ["[STOP]", {"content": "[STOP]", "lstrip": False}])
def test_eos_is_what_tokenizer_config_says(tmp_path: Path, named: Any) -> None:
    path = word_level(tmp_path / "tokenizer.json", "<eos>", "[STOP]")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
    assert load_tokenizer(build_tokenizer(taken(tmp_path, path))).eos_token == "[STOP]"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"special_tokens_map.json": {"eos_token": "[STOP]"}}, "[STOP]"),
        ({"special_tokens_map.json": {"eos_token": {"content": "[STOP]"}}}, "[STOP]"),
        ({"config.json": {"eos_token_id": 4}}, "[STOP]"),
        ({"config.json": {"eos_token_id": [99, 4, 3]}}, "[STOP]"),
        (
            {"special_tokens_map.json": {"eos_token": "gone"}, "config.json": {"eos_token_id": 4}},
            "[STOP]",
        ),
        ({"tokenizer_config.json": {}, "config.json": {"eos_token_id": 4}}, "[STOP]"),
        (
            {
                "tokenizer_config.json": {"eos_token": "<eos>"},
                "special_tokens_map.json": {"eos_token": "[STOP]"},
            },
            "<eos>",
        ),
        (
            {"special_tokens_map.json": {"eos_token": "<eos>"}, "config.json": {"eos_token_id": 4}},
            "<eos>",
        ),
        ({"special_tokens_map.json": [], "config.json": {"eos_token_id": True}}, "<eos>"),
    ],
)
def test_eos_is_what_a_file_names_before_a_guess(
    tmp_path: Path, files: dict[str, Any], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = word_level(tmp_path / "tokenizer.json", "<eos>", "[STOP]")
    of_config = {name: data for name, data in files.items() if name == "tokenizer_config.json"}
    for name, data in of_config.items():
        (tmp_path / name).write_text(json.dumps(data))
    id_of_guess = taken(tmp_path, path).ids.tokenizer
    for name, data in files.items():
        (tmp_path / name).write_text(json.dumps(data))
    config = taken(tmp_path, path)
    folder = build_tokenizer(config)
    assert load_tokenizer(folder).eos_token == expected
    assert (config.ids.tokenizer == id_of_guess) == (expected == "<eos>"), "right ids stay"
    facts = json.loads((folder / "manifest.json").read_text())
    is_guess = files == {"special_tokens_map.json": [], "config.json": {"eos_token_id": True}}
    assert (facts.get("eos_token_from") == "a guess") == is_guess
    assert ("a guess" in capsys.readouterr().err) == is_guess


def test_eos_of_the_config_comes_first(tmp_path: Path) -> None:
    path = word_level(tmp_path / "tokenizer.json", "<eos>", "[END]")
    config = taken(tmp_path, path, eos_token="[END]")
    assert load_tokenizer(build_tokenizer(config)).eos_token == "[END]"


@pytest.mark.parametrize("asked", [None, "<nowhere>"])
def test_without_eos_the_special_tokens_are_listed(tmp_path: Path, asked: str | None) -> None:
    path = word_level(tmp_path / "tokenizer.json", "[FIRST]", "[SECOND]")
    with pytest.raises(ConfigError) as caught:
        build_tokenizer(taken(tmp_path, path, eos_token=asked))
    assert "[FIRST], [SECOND]" in caught.value.cause
    assert "tokenizer.eos_token" in caught.value.fix


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json.*no such file"):
        build_tokenizer(taken(tmp_path, tmp_path / "nowhere.json"))


def test_a_file_that_is_not_a_tokenizer_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text('{"model": "none"}')
    with pytest.raises(DataError, match="is not a tokenizer that can be loaded"):
        build_tokenizer(taken(tmp_path, path))


def test_tokenizer_that_hangs_in_its_offline_test_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "OFFLINE_SEC", 0.2)
    monkeypatch.setattr(tokenizer, "_OFFLINE_TEST", "import time; time.sleep(20)")
    with pytest.raises(UnfitError, match=r"has not ended after 0\.2 s"):
        tokenizer._test_offline(tmp_path / "tokenizer.json", "<eos>", 0)
