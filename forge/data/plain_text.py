"""Change a tokenizer.json so that text which spells a special token does not get its id."""

from __future__ import annotations

import re
from typing import Any

# A noncharacter of Unicode, which neither a byte-level alphabet nor ordinary text contains.
HIDDEN = "\U0010fffe"
# Pieces that a model with byte fallback uses for the bytes of an unknown character.
BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")


def for_plain_text(parts: dict[str, Any], eos_token: str) -> dict[str, Any]:
    """The parts of a tokenizer.json, changed so that no text becomes `eos_token` or a special token.

    Flags of the tokenizers library keep text from being encoded as an added token, but the model may
    still produce its id: Unigram and WordLevel have "</s>" as a word, merges of a BPE can spell it. So
    such tokens are renamed to strings that text does not contain, and merges that make or use them are
    removed. All ids stay. A piece of one character or byte keeps its name, since it may be the only
    way to encode a text: `encoders.refuse_end` refuses a text that gives the end-of-text id.
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
        "post_processor": None,  # would add special tokens
    }


def _renamed(model: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """The model with some tokens renamed; ids do not change."""
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
