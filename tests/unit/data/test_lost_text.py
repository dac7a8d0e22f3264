"""A tokenizer trains into something else where its ids do not give the text back: 12 kinds of models with
16 changes each lose what is counted, and no more."""

from __future__ import annotations

import copy
import json
import unicodedata
from collections import Counter
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders

from forge.data.encoders import reference_encoder
from forge.data.lost_text import LossCounter, Spelling, byte_alphabet, keeps_all_text
from forge.data.statistics import TextCounts
from forge.data.tokenizer import LoadedTokenizer, _parse

EOS, UNK = "<|endoftext|>", "<unk>"
ASCII = [chr(code) for code in range(0x20, 0x7F)]
LETTERS = [*ASCII, "\n", "\t"]
BYTE = {byte: char for char, byte in byte_alphabet().items()}
BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]
ENGLISH = "The cat sat on the mat, 12 times: cats & dogs; the dog has 3 hats. cat cat cat\n" * 20
TEXTS = {
    "english": ENGLISH,
    "little": ENGLISH + "Ж",
    "mixed": ENGLISH + "Привет, мир! Ёжик в naïve café. 世界 한국어 🙂\n" * 6,
    "russian": "Привет мир, как дела сегодня? Ёлка 7\n" * 20,
}

# --- twelve kinds of models, each with the decoder that reads its pieces ---------------------------


def bpe(pieces: list[str], merges: list[list[str]] | None = None, **keys: Any) -> dict[str, Any]:
    merges = merges or [["c", "a"], ["ca", "t"], ["t", "h"], ["th", "e"]]
    prefix = len(keys.get("continuing_subword_prefix") or "")
    words = [left + right[prefix:] for left, right in merges]
    vocab = {piece: number for number, piece in enumerate(dict.fromkeys([*pieces, *words, EOS]))}
    return {"type": "BPE", "vocab": vocab, "merges": merges, **keys}


def level(kind: str, pieces: list[str], **keys: Any) -> dict[str, Any]:
    vocab = {piece: number for number, piece in enumerate(dict.fromkeys([UNK, *pieces, EOS]))}
    return {"type": kind, "vocab": vocab, "unk_token": UNK, **keys}


def unigram(pieces: list[str], **keys: Any) -> dict[str, Any]:
    vocab = [[UNK, 0.0], *([piece, -float(len(piece))] for piece in pieces), [EOS, -9.0]]
    return {"type": "Unigram", "vocab": vocab, "unk_id": 0, **keys}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
META = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
WORDS = ["cat", "the", "sat", "##s", "##t", *LETTERS, *(f"##{c}" for c in LETTERS)]

MODELS: dict[str, tuple[dict[str, Any], dict[str, Any] | None, Any]] = {
    "bytes": (bpe([*BYTE.values()]), BYTES, decoders.ByteLevel()),
    "bytes of ASCII": (bpe([BYTE[b] for b in range(128)]), BYTES, decoders.ByteLevel()),
    "bytes without one": (
        bpe([char for byte, char in BYTE.items() if byte != 0xD0]),
        BYTES,
        decoders.ByteLevel(),
    ),
    "BPE": (bpe([*LETTERS, "▁"]), META, decoders.Metaspace()),
    "BPE with unk": (bpe([UNK, *LETTERS, "▁"], unk_token=UNK), META, decoders.Metaspace()),
    "BPE with fallback": (
        bpe([UNK, *LETTERS, "▁", *BYTE_PIECES], unk_token=UNK, byte_fallback=True),
        META,
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    ),
    "BPE with half of the fallback": (
        bpe([UNK, *LETTERS, "▁", *BYTE_PIECES[:0xD1]], unk_token=UNK, byte_fallback=True),
        META,
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    ),
    "BPE with a suffix": (
        bpe([*LETTERS, *(f"{c}</w>" for c in LETTERS)], end_of_word_suffix="</w>"),
        {"type": "WhitespaceSplit"},
        decoders.BPEDecoder(),
    ),
    "WordLevel": (
        level(
            "WordLevel",
            [*"Tt,.:;&?!37", "The", "the", "cat", "mat", "on", "12"],
        ),
        {"type": "Whitespace"},
        None,
    ),
    "WordPiece": (
        level("WordPiece", WORDS, continuing_subword_prefix="##", max_input_chars_per_word=100),
        {"type": "BertPreTokenizer"},
        decoders.WordPiece(cleanup=False),
    ),
    "Unigram": (unigram([*LETTERS, "▁", "▁cat"]), META, decoders.Metaspace()),
    "Unigram with fallback": (
        unigram([*LETTERS, "▁", *BYTE_PIECES], byte_fallback=True),
        META,
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    ),
}

# --- sixteen changes ------------------------------------------------------------------------------


def normalizer(kind: str, **keys: Any) -> dict[str, Any]:
    return {"normalizer": {"type": kind, **keys}}


def both(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"normalizer": {"type": "Sequence", "normalizers": list(steps)}}


def added(number: int, content: str, **keys: Any) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": number, "content": content, "special": False, **flags, **keys}


BERT = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True}
CHANGES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "no decoder": {"decoder": None},
    "another decoder": {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}},
    "NFC": normalizer("NFC"),
    "NFKC": normalizer("NFKC"),
    "lowercase": normalizer("Lowercase"),
    "accents": both({"type": "NFD"}, {"type": "StripAccents"}, {"type": "Lowercase"}),
    "as BERT": normalizer("BertNormalizer", **BERT),
    "digits taken away": normalizer("Replace", pattern={"Regex": "[0-9]"}, content=""),
    "digits are 0": normalizer("Replace", pattern={"Regex": "[1-9]"}, content="0"),
    "all but ASCII taken away": normalizer("Replace", pattern={"Regex": "[^ -~]"}, content=""),
    "truncated": {
        "truncation": {
            "direction": "Right",
            "max_length": 4,
            "strategy": "LongestFirst",
            "stride": 0,
        }
    },
    "an added word": {"added": "dogs"},
    "an added special word": {"added": "mat", "special": True},
    "words taken away": {"removed": "cat"},
    "stripped": normalizer("Strip", strip_left=True, strip_right=True),
}


def changed(kind: str, change: str) -> tuple[LoadedTokenizer, tokenizers.Tokenizer]:
    """The tokenizer as Forge loads it, and one with the decoder that reads its pieces."""
    model, words, decoder = copy.deepcopy(MODELS[kind])
    keys = dict(CHANGES[change])
    parts = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": words,
        "post_processor": None,
        "decoder": decoder and json.loads(decoder.__getstate__()),
        "model": model,
    }
    if word := keys.pop("added", None):
        parts["added_tokens"] = [
            added(len(model["vocab"]), word, special=keys.pop("special", False))
        ]
    if word := keys.pop("removed", None):
        split = {
            "type": "Split",
            "pattern": {"String": word},
            "behavior": "Removed",
            "invert": False,
        }
        parts["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, words]}
    tokenizer = _parse(json.dumps(parts | keys).encode(), "the test's tokenizer")
    size = max(tokenizer.get_vocab().values()) + 1
    eos_id = tokenizer.token_to_id(EOS)
    assert eos_id is not None
    loaded = LoadedTokenizer(tokenizer, "test", "0" * 64, size, EOS, eos_id)
    reader = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    if decoder is not None:
        reader.decoder = decoder
    return loaded, reader


def counted(tokenizer: LoadedTokenizer, text: str) -> TextCounts:
    counter = LossCounter(Spelling(tokenizer))
    counter.add([text], reference_encoder(tokenizer)([text]))
    return counter.counts()


# --- the truth, by a decoder ----------------------------------------------------------------------


def bare(text: str) -> Counter[str]:
    """Characters without case, accents, compatibility forms and white space."""
    folded = unicodedata.normalize("NFKD", unicodedata.normalize("NFC", text)).casefold()
    kept = "".join(c for c in folded if not unicodedata.combining(c) and not c.isspace())
    return Counter(unicodedata.normalize("NFC", kept))


def not_given_back(tokenizer: LoadedTokenizer, reader: tokenizers.Tokenizer, text: str) -> int:
    unknown = reader.token_to_id(UNK)
    (ids,) = reference_encoder(tokenizer)([text])
    back = reader.decode([i for i in ids.tolist() if i != unknown], skip_special_tokens=False)
    return (bare(text) - bare(back)).total()


@pytest.mark.parametrize("kind", MODELS)
def test_what_is_counted_as_lost_is_what_decoding_does_not_give_back(kind: str) -> None:
    for change in CHANGES:
        tokenizer, reader = changed(kind, change)
        for name, text in TEXTS.items():
            counts = counted(tokenizer, text)
            truth = not_given_back(tokenizer, reader, text)
            assert counts.lost == truth, (change, name, counts, truth)
            assert counts.characters == len(text)
            if keeps_all_text(tokenizer):
                assert (counts.lost, counts.changed, counts.white_space) == (0, 0, 0), change
