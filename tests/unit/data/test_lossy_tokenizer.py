"""A corpus of which a tokenizer loses much is refused before anything is written, and less is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from forge.core.config import Config, ResolvedConfig
from forge.core.errors import DataError
from forge.core.paths import STATISTICS, tokens_folder
from forge.data.content_ids import resolve
from forge.data.lossy_tokenizer import check_tokenizer
from forge.data.shards import ShardSet
from forge.data.statistics import TextCounts, read_statistics
from forge.data.tokenize import tokenize
from forge.data.tokenizer import build_tokenizer

LETTERS = [chr(code) for code in range(0x20, 0x7F)]
ENGLISH, RUSSIAN = "the cat sat on the mat. ", "Привет мир, как дела. "


def of_ascii() -> Tokenizer:
    """A BPE of ASCII without unk_token: it drops all other characters."""
    vocab = {piece: number for number, piece in enumerate(["▁", "<|endoftext|>", *LETTERS])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def config_of(texts: list[str], used: Tokenizer | None = None, **settings: Any) -> ResolvedConfig:
    """A config for a corpus of these documents, with its tokenizer built; in the working directory."""
    (used or of_ascii()).save("used.json")
    Path("texts").mkdir(exist_ok=True)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    Path("texts/a.jsonl").write_text(lines)
    values = {"inputs": ["texts"], "val_fraction": 0.3, **settings}
    tokenizer = {"source": "path", "path": "used.json"}
    config = resolve(Config(data="data", tokenizer=tokenizer, tokenize=values))
    build_tokenizer(config)
    return config


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def counts_of(config: ResolvedConfig) -> TextCounts:
    statistics = read_statistics(tokens_folder(config.data, config.ids.tokens))
    assert statistics and statistics.text
    return statistics.text


def documents(english: int, russian: int) -> list[str]:
    numbered = [f"{n} {ENGLISH * 4}" for n in range(english)]
    return numbered + [f"{n} {RUSSIAN * 4}" for n in range(russian)]


def test_text_that_the_tokenizer_drops_is_refused_with_the_old_tokens_untouched() -> None:
    config = config_of(documents(40, 0))
    folder = tokenize(config, workers=1)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    size = Path("texts/a.jsonl").stat().st_size
    russian = json.dumps({"text": RUSSIAN * 20}, ensure_ascii=False) + "\n"
    edited = (russian * 99).encode()[:size].rpartition(b"\n")[0]
    Path("texts/a.jsonl").write_bytes(edited.ljust(size, b"\n"))  # of the same size, so the same id
    with pytest.raises(DataError) as err:
        tokenize(config, workers=1)
    assert "loses text" in err.value.what and "'е'" in err.value.what
    assert "tokenize.max_lost" in err.value.fix
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_small_share_is_said_and_counted_exactly(capsys: pytest.CaptureFixture[str]) -> None:
    texts = documents(200, 5)
    config = config_of(texts)
    tokenize(config, workers=2)
    lost = sum(not char.isascii() for text in texts for char in text)
    assert counts_of(config).lost == lost
    said = capsys.readouterr().err
    assert f"warning: tokens {config.ids.tokens}: {lost:,} of " in said
    tokenize(config, workers=1)
    said = capsys.readouterr().err
    assert "nothing to do" in said and f"{lost:,} of " in said


def test_a_tiny_share_is_in_the_statistics_only(capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of([*documents(300, 0), "naïve"])
    tokenize(config, workers=1)
    assert counts_of(config).lost == 1
    assert "lost" not in capsys.readouterr().err


def test_max_lost_allows_it_and_changes_neither_id_nor_manifest() -> None:
    config = config_of(documents(20, 20))
    with pytest.raises(DataError, match="loses text"):
        tokenize(config, workers=1)
    allowed = config_of(documents(20, 20), max_lost=0.5)
    assert allowed.ids == config.ids
    manifest = ShardSet.open(tokenize(allowed, workers=1)).manifest
    assert "max_lost" not in manifest.settings
    assert 0.2 < counts_of(allowed).lost_share < 0.5


def test_a_share_that_the_sample_did_not_see_is_refused_before_the_manifest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("forge.data.lossy_tokenizer.SAMPLE_BYTES", 100)
    config = config_of(documents(20, 80))
    with pytest.raises(DataError, match="loses text") as err:
        tokenize(config, workers=2)
    assert "sample" not in err.value.what
    assert not (tokens_folder(config.data, config.ids.tokens) / "manifest.json").exists()


def test_tokens_of_an_earlier_version_are_checked_by_their_text() -> None:
    config = config_of(documents(20, 20), max_lost=1)
    folder = tokenize(config, workers=1)
    (folder / STATISTICS).unlink()
    with pytest.raises(DataError, match="loses text"):
        tokenize(config_of(documents(20, 20)), workers=1)
    ShardSet.open(folder).verify()


def test_old_tokens_are_refused_before_training_where_their_text_is_still_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tokenize(config_of(documents(20, 20), max_lost=1), workers=1)
    config = config_of(documents(20, 20))
    with pytest.raises(DataError, match="loses text"):
        check_tokenizer(config)
    (folder / STATISTICS).unlink()
    with pytest.raises(DataError, match="in a sample of"):
        check_tokenizer(config)
    check_tokenizer(config_of(documents(20, 20), max_lost=1))
    assert "cannot tell" not in capsys.readouterr().err
    Path("texts/a.jsonl").unlink()
    check_tokenizer(config)
    assert "cannot tell whether the tokenizer has lost text" in capsys.readouterr().err


def test_white_space_that_is_left_out_is_said_and_allowed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["[UNK]", "the", "cat", "sat", "on", "mat", ".", "<|endoftext|>", *map(str, range(40))]
    model = models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    config = config_of(documents(40, 0), tokenizer)
    tokenize(config, workers=1)
    assert counts_of(config).lost == 0
    assert "characters of white space are left out" in capsys.readouterr().err
