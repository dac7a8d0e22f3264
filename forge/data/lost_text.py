"""Characters of a text that its token ids do not give back, counted by what each id spells.

A decoder of the tokenizer is not asked: some files have none or a wrong one, and decoding takes up to
half as long as encoding. Counting takes 1 to 2 % of it (measured: WordPiece, Unigram, BPE).
"""

from __future__ import annotations

import functools
import json
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge.core.files import utf8_bytes
from forge.data.plain_text import BYTE_PIECE
from forge.data.statistics import MOST_LOST, TextCounts
from forge.data.tokenizer import LoadedTokenizer

Counts = NDArray[np.int64]
# All that occur in UTF-8: bytes 0xc0, 0xc1 and those from 0xf5 on do not.
UTF8 = frozenset(range(0xF5)) - {0xC0, 0xC1}
# Steps before a byte-level model that divide text and remove none of it, but for `behavior: Removed`.
DIVIDING = ("ByteLevel", "Split", "Digits", "Punctuation")
CONTROL = frozenset({"Cc", "Cf", "Zs", "Zl", "Zp"})  # categories of Unicode, counted as white space


# --- what an id spells ----------------------------------------------------------------------------


def byte_alphabet() -> dict[str, int]:
    """Byte of each character of a byte-level vocabulary: printable ones of Latin-1 stand for themselves,
    the others for U+0100 and on (openai/gpt-2, src/encoder.py, bytes_to_unicode)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): b for i, b in enumerate(others)
    }


def steps_of(part: Any) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer of a tokenizer.json, in their order."""
    if isinstance(part, dict):
        nested = part.get("normalizers", part.get("pretokenizers"))
        for step in nested if isinstance(nested, list) else ():
            yield from steps_of(step)
        if not isinstance(nested, list):
            yield part


def keeps_all_text(tokenizer: LoadedTokenizer) -> bool:
    """Return whether the ids of any text spell this text, up to NFC: a byte-level BPE that has all
    bytes."""
    parts = tokenizer.text_parts
    model, steps = parts["model"], list(steps_of(parts["pre_tokenizer"]))
    return (
        model["type"] == "BPE"
        and parts["normalizer"] in (None, {"type": "NFC"})
        and bool(steps)
        and steps[-1]["type"] == "ByteLevel"
        and all(step["type"] in DIVIDING and step.get("behavior") != "Removed" for step in steps)
        and {byte for char, byte in byte_alphabet().items() if char in model["vocab"]} >= UTF8
    )


class Spelling:
    """The characters and bytes that each id of a tokenizer stands for, and its normalizer."""

    def __init__(self, tokenizer: LoadedTokenizer) -> None:
        parts = tokenizer.text_parts
        model = parts["model"]
        before = [*steps_of(parts["normalizer"]), *steps_of(parts["pre_tokenizer"])]
        self._alphabet = byte_alphabet() if _has(before, "ByteLevel") else {}
        marks = {"▁", *(step["replacement"] for step in before if step.get("replacement"))}
        self._spaces = set() if self._alphabet else marks
        self._prefix = model.get("continuing_subword_prefix") or ""
        self._suffix = model.get("end_of_word_suffix") or ""
        self._has_byte_pieces = bool(model.get("byte_fallback"))
        self._normalizer = _without_bytes(tokenizer).normalizer
        self.normalized = functools.cache(self._normalized)
        self.characters, self.bytes = [""] * tokenizer.vocab_size, [""] * tokenizer.vocab_size
        for piece, number in tokenizer.for_text.get_vocab(with_added_tokens=False).items():
            self.characters[number], self.bytes[number] = self._spelled(piece)
        for token in parts["added_tokens"]:
            content = "".join(map(self.normalized, token["content"]))
            self.characters[token["id"]], self.bytes[token["id"]] = content, ""
        if (unknown := _unknown_id(model)) is not None:
            self.characters[unknown] = self.bytes[unknown] = ""
        self.known_bytes = frozenset("".join(self.bytes))

    def _spelled(self, piece: str) -> tuple[str, str]:
        """Characters, and bytes as the characters U+0000 to U+00FF."""
        if self._has_byte_pieces and BYTE_PIECE.fullmatch(piece):
            return "", chr(int(piece[3:5], 16))
        piece = piece.removeprefix(self._prefix)
        if self._suffix:
            piece = piece.removesuffix(self._suffix)
        bytes_ = "".join(chr(self._alphabet[char]) for char in piece if char in self._alphabet)
        rest = "".join(char for char in piece if char not in self._alphabet) if bytes_ else piece
        return self.plain_spaces(rest), bytes_

    def _normalized(self, character: str) -> str:
        text = self._normalizer.normalize_str(character) if self._normalizer else character
        return self.plain_spaces(text)

    def plain_spaces(self, text: str) -> str:
        """The text with spaces in place of the characters that a tokenizer has for them."""
        for space in self._spaces:
            text = text.replace(space, " ")
        return text


def _has(steps: Sequence[dict[str, Any]], kind: str) -> bool:
    return any(step["type"] == kind for step in steps)


def _without_bytes(tokenizer: LoadedTokenizer) -> Any:
    """The tokenizer with a normalizer that gives characters, not bytes of a byte-level alphabet."""
    from tokenizers import Tokenizer

    steps = list(steps_of(tokenizer.text_parts["normalizer"]))
    if not _has(steps, "ByteLevel"):
        return tokenizer.for_text
    kept = [step for step in steps if step["type"] != "ByteLevel"]
    sequence = {"type": "Sequence", "normalizers": kept} if kept else None
    return Tokenizer.from_str(json.dumps(tokenizer.text_parts | {"normalizer": sequence}))


def _unknown_id(model: dict[str, Any]) -> int | None:
    if model["type"] == "Unigram":
        return model.get("unk_id")
    return model["vocab"].get(model.get("unk_token"))


# --- counting -------------------------------------------------------------------------------------


class LossCounter:
    """Counts of documents: their size and, with a `Spelling`, the characters that their ids do not spell.
    Without one, none is lost."""

    def __init__(self, spelling: Spelling | None) -> None:
        self._spelling = spelling
        self._num_bytes = self._num_characters = 0
        self._text = np.zeros(0, np.int64)  # by code point, up to the largest one
        self._ids = np.zeros(len(spelling.characters) if spelling else 0, np.int64)

    def num_bytes(self, document: str) -> int:
        """Bytes of a document, which are counted here: a second look at each text would cost time."""
        size = utf8_bytes(document)
        self._num_bytes += size
        return size

    def add(self, documents: Sequence[str], encoded: Sequence[NDArray[np.uint32]]) -> None:
        """Count the characters of documents, and their ids."""
        self._num_characters += sum(map(len, documents))
        if self._spelling:
            # Canonical composition: é as one character or as two is the same text.
            text = "".join(unicodedata.normalize("NFC", document) for document in documents)
            self._text = _sum(self._text, np.bincount(_codes(text)))
            self._ids += np.bincount(np.concatenate(encoded), minlength=len(self._ids))

    def counts(self) -> TextCounts:
        """Counts of all documents so far."""
        sizes = TextCounts(bytes=self._num_bytes, characters=self._num_characters)
        return (
            sizes + _Loss(self._spelling, self._text, self._ids).counts if self._spelling else sizes
        )


def _codes(text: str) -> NDArray[np.uint32]:
    """Code points of the characters of a text."""
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


def _sum(one: Counts, other: Counts) -> Counts:
    """Sum of two arrays of counts, of which one may be shorter."""
    short, long = sorted((one, other), key=len)
    total = long.copy()
    total[: len(short)] += short
    return total


class _Loss:
    """Counts of the characters that the normalizer of a tokenizer takes from a text, or that the ids do
    not spell after it. Where ids spell some of a normalized character, each character that became it has
    lost the same share."""

    def __init__(self, spelling: Spelling, text: Counts, ids: Counts) -> None:
        used = np.flatnonzero(ids)
        self._characters = _spelled([spelling.characters[i] for i in used], ids[used])
        self._bytes = _spelled([spelling.bytes[i] for i in used], ids[used])
        self._spelling = spelling
        numbers = _by_character(text)
        shares = self._missing_shares(numbers)
        self._lost: Counter[str] = Counter()
        self._white_space = self._changed = 0
        for character, number in numbers.items():
            share = self._lost_share(character, shares)
            self._count(character, number, round(number * share))

    @property
    def counts(self) -> TextCounts:
        return TextCounts(
            lost=self._lost.total(),
            changed=self._changed,
            white_space=self._white_space,
            most_lost=dict(self._lost.most_common(MOST_LOST)),
        )

    def _count(self, character: str, number: int, lost: int) -> None:
        if _is_space(character):
            self._white_space += lost
            return
        if lost:
            self._lost[character] += lost
        if unicodedata.normalize("NFC", self._spelling.normalized(character)) != character:
            self._changed += number - lost

    def _lost_share(self, character: str, shares: dict[str, float]) -> float:
        """Share of a character's occurrences that do not come back. Marks of a letter do not count."""
        normal = self._spelling.normalized(character)
        if not _is_same(character, normal):
            return 1.0
        letters = [part for part in normal if not unicodedata.combining(part)]
        return max((shares.get(part, 0.0) for part in letters or normal), default=0.0)

    def _missing_shares(self, numbers: dict[str, int]) -> dict[str, float]:
        """Share of each normalized character that neither pieces nor bytes spell."""
        wanted: Counter[str] = Counter()
        for character, number in numbers.items():
            for part in self._spelling.normalized(character):
                wanted[part] += number
        left = {part: n - self._characters.get(part, 0) for part, n in wanted.items()}
        bytes_of = {part: _as_bytes(part) for part, number in left.items() if number > 0}
        needed: Counter[str] = Counter()  # by characters whose bytes the vocabulary has
        for part, its_bytes in bytes_of.items():
            if its_bytes <= self._spelling.known_bytes:
                needed.update(dict.fromkeys(its_bytes, left[part]))
        shares = {}
        for part, its_bytes in bytes_of.items():
            has = [self._bytes.get(byte, 0) / max(1, needed[byte]) for byte in its_bytes]
            is_known = its_bytes <= self._spelling.known_bytes
            shares[part] = left[part] / wanted[part] * (1 - min(1.0, *has) if is_known else 1)
        return shares


def _spelled(texts: list[str], counts: Counts) -> dict[str, int]:
    """Characters of texts that occur so many times."""
    weights = np.repeat(counts, [len(text) for text in texts])
    return _by_character(np.bincount(_codes("".join(texts)), weights))


def _by_character(counts: NDArray[Any]) -> dict[str, int]:
    return {chr(code): int(counts[code]) for code in np.flatnonzero(counts)}


def _as_bytes(character: str) -> frozenset[str]:
    """The bytes of a character in UTF-8, as the characters U+0000 to U+00FF."""
    return frozenset(map(chr, character.encode()))


@functools.cache
def _is_space(character: str) -> bool:
    return character.isspace() or unicodedata.category(character) in CONTROL


@functools.cache
def _is_same(character: str, normal: str) -> bool:
    """Return whether a normalized text still has the character, but for case, accent and compatibility
    form; of white space whether it is any text."""
    if _is_space(character):
        return bool(normal)
    return character == normal or _bare(character) in _bare(normal)


def _bare(text: str) -> str:
    folded = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold())
    return "".join(char for char in folded if not unicodedata.combining(char)) or text
