"""Threat: text of which a part is lost, doubled or broken while it is printed token by token."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from forge.data.tokenizer import LoadedTokenizer
from forge.plugins.prompt.prompt import parts

TEXT = "Grüße, 世界 🙂 ok"


@pytest.fixture
def tokenizer() -> LoadedTokenizer:
    """One token a byte: each character but those of ASCII is made by several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate([*alphabet, "<end>"])}
    made = Tokenizer(models.BPE(vocab, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    return LoadedTokenizer(made, "bytes", "0" * 64, len(vocab), "<end>", vocab["<end>"])


def test_characters_come_whole_and_in_order_and_together_they_are_the_text(tokenizer):
    ids = tokenizer.encode(TEXT)
    assert len(ids) == len(TEXT.encode())
    given = list(parts(tokenizer, tokenizer.encode("the "), ids))
    assert [part for part in given if part] == list(TEXT)


def test_prompt_is_not_repeated_and_nothing_new_gives_nothing(tokenizer):
    assert "".join(parts(tokenizer, tokenizer.encode("🙂"), [])) == ""
    assert "".join(parts(tokenizer, tokenizer.encode("🙂"), tokenizer.encode("a"))) == "a"


def test_bytes_that_are_no_character_are_shown_once(tokenizer):
    half = tokenizer.encode("世")[:2]
    assert "".join(parts(tokenizer, [], half)) == tokenizer.decode(half) == "\ufffd"
    ids = [*half, *tokenizer.encode("x"), *half]
    assert "".join(parts(tokenizer, [], ids)) == "\ufffdx\ufffd"
