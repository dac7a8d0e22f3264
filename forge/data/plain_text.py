"""The tokenizer.json that encodes text: text can spell a special token but never becomes its id."""

from __future__ import annotations

import re
from typing import Any

# A noncharacter of Unicode: no byte-level alphabet has it, and no text for people.
HIDDEN = "\U0010fffe"
# What a model falls back to for the bytes of a character that it does not know.
BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")


def for_plain_text(parts: dict[str, Any], eos_token: str) -> dict[str, Any]:
    """The parts of a tokenizer.json, changed so that no text becomes `eos_token` or a special token.

    Flags of the tokenizers library keep text from being taken for an added token, but not the model:
    Unigram and WordLevel know "</s>" as a word, merges of a BPE can spell it. Here the model knows it
    by a name that text does not spell, and merges that lead to it or on from it are gone. All ids
    stay. A piece that may be the only spelling of a text (one character, one byte) keeps its name:
    a text that has it becomes its id, which must be refused where that ends a document.
    """
    added = parts["added_tokens"]
    special = {token["content"] for token in added if token["special"]} | {eos_token}
    names = {
        token: f"{HIDDEN}{token}{HIDDEN}"
        for token in special
        if len(token) > 1 and not BYTE_PIECE.fullmatch(token)
    }
    return parts | {
        "model": _renamed(parts["model"], names),
        "added_tokens": [
            token
            | {
                "content": names.get(token["content"], token["content"]),
                "special": token["content"] in special,
            }
            for token in added
        ],
        # It would add special tokens of its own.
        "post_processor": None,
    }


def _renamed(model: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """A model that knows some tokens by other names, under the same ids."""
    vocab = model["vocab"]
    changed: dict[str, Any] = {}
    if isinstance(vocab, list):  # Unigram: pieces with their scores
        changed["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    else:
        changed["vocab"] = {names.get(token, token): number for token, number in vocab.items()}
    if "unk_token" in model:
        changed["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        prefix = len(model.get("continuing_subword_prefix") or "")
        changed["merges"] = [
            [left, right]
            for left, right in model["merges"]
            if names.keys().isdisjoint((left, right, left + right[prefix:]))
        ]
    return model | changed
