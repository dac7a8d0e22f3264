"""Word sequences that items of tasks share with a text: which there are, and which a document holds.

Words are as in GPT-3's search for benchmarks in its training text (arXiv 2005.14165, appendix C), but
that punctuation separates words in place of being removed.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3

# Of a sequence, and the fewest of an item that is looked for; characters are those of scripts without
# blanks between words: as much text as so many words.
THRESHOLDS = {"words": 13, "least_words": 5, "characters": 30, "least_characters": 12}
# Thai and Lao, Tibetan, Myanmar, Khmer, Chinese and Japanese. Korean has blanks.
NO_BLANKS = re.compile(
    "[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u2e80-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
UTF_32 = "utf-32-le"
MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64

Array = np.ndarray[Any, Any]


class Item(NamedTuple):
    """A question of a task, and its right answer; either may be empty."""

    question: str
    answer: str

    @property
    def digest(self) -> str:
        """First half of the blake3 of both, as 32 hex digits."""
        return blake3(f"{self.question}\0{self.answer}".encode(errors="replace")).hexdigest(16)


class ItemSequences(NamedTuple):
    """Numbers of the sequences of an item: of its question alone, of question and answer, and those of
    the latter that reach into the answer."""

    question: list[int]
    whole: list[int]
    answer: list[int]


@cache
def _without_punctuation() -> Array:
    """Code point -> itself, or a blank in place of punctuation and symbols."""
    table = np.arange(0x110000, dtype="<u4")
    table[[p for p in range(len(table)) if unicodedata.category(chr(p))[0] in "PS"]] = ord(" ")
    return table


def words(text: str) -> list[str]:
    """Words of a text after NFKC, in lower case, between blanks, punctuation and symbols."""
    plain = text if text.isascii() else unicodedata.normalize("NFKC", text)
    points = np.frombuffer(plain.lower().encode(UTF_32, "surrogatepass"), "<u4")
    return _without_punctuation()[points].tobytes().decode(UTF_32, "surrogatepass").split()


@cache
def _powers(size: int) -> tuple[Array, Array]:
    """Powers of MULTIPLIER, from the first, and of its inverse, modulo 2^64."""
    factors = (MULTIPLIER, pow(MULTIPLIER, -1, 2**64))
    first, second = (np.multiply.accumulate(np.full(size, f, np.uint64)) for f in factors)
    return first, second


class Sequences:
    """All sequences of some items. Memory grows with their number, and with no text that is searched.

    A document's windows are looked up in a table of bits by a rolling hash, and those that are in it by
    128 bits of the blake3 of their text: no collision of hashes counts as found.
    """

    def __init__(self, items: Iterable[Item]) -> None:
        self.items: list[ItemSequences | None] = []
        """For each item in order; None for one that is too short to be looked for."""
        self._numbers: dict[bytes, int] = {}
        self._values: dict[str, int] = {}  # of words and characters, for the hash of a window
        self._lengths: dict[str, set[int]] = {"words": set(), "characters": set()}
        hashes: list[Array] = [np.zeros(1, np.uint64)]
        for item in items:
            question, answer = words(item.question), words(item.answer)
            text = "".join(question + answer)
            unit = "characters" if len(NO_BLANKS.findall(text)) * 2 > len(text) else "words"
            of_question: Sequence[str] = question if unit == "words" else "".join(question)
            of_whole: Sequence[str] = question + answer if unit == "words" else text
            alone, whole = (self._add(part, unit, hashes) for part in (of_question, of_whole))
            # A window that starts here or later ends in the answer.
            start = max(0, len(of_question) - min(THRESHOLDS[unit], len(of_whole)) + 1)
            reach = whole[start:] if answer else whole
            self.items.append(ItemSequences(alone, whole, reach) if whole else None)
        bits = max(16, (32 * len(self._numbers)).bit_length())  # at most every 32nd is set
        self._shift = np.uint64(64 - bits)
        self._table = np.zeros(2**bits, dtype=bool)
        self._table[np.concatenate(hashes) >> self._shift] = True

    def found(self, document: str) -> set[int]:
        """Numbers of the sequences that a document holds."""
        split, numbers = words(document), set[int]()
        parts: dict[str, Sequence[str]] = {"words": split}
        if self._lengths["characters"] and NO_BLANKS.search(document):
            parts["characters"] = "".join(split)
        for unit, part in parts.items():
            for length, hashes in self._hashes(part, self._lengths[unit]):
                for start in np.flatnonzero(self._table[hashes >> self._shift]).tolist():
                    number = self._numbers.get(_key(part[start : start + length]))
                    if number is not None:
                        numbers.add(number)
        return numbers

    def _add(self, part: Sequence[str], unit: str, hashes: list[Array]) -> list[int]:
        """Numbers of the sequences of a text, new ones where it has new sequences. Adds their hashes."""
        length = min(THRESHOLDS[unit], len(part))
        if length < THRESHOLDS[f"least_{unit}"]:
            return []
        for symbol in part:
            if symbol not in self._values:
                self._values[symbol] = int.from_bytes(
                    blake3(symbol.encode(errors="replace")).digest(8)
                )
        hashes += [found for _, found in self._hashes(part, {length})]
        self._lengths[unit].add(length)
        keys = (_key(part[i : i + length]) for i in range(len(part) - length + 1))
        return [self._numbers.setdefault(key, len(self._numbers)) for key in keys]

    def _hashes(self, part: Sequence[str], lengths: set[int]) -> Iterator[tuple[int, Array]]:
        """Each of these lengths that the text has, and the hash of each of its windows of that length."""
        values = np.fromiter(map(self._values.get, part, repeat(0)), np.uint64, len(part))
        powers, inverse = _powers(max(2**16, 1 << len(part).bit_length()))
        sums = np.zeros(len(part) + 1, dtype=np.uint64)
        np.cumsum(values * powers[: len(part)], out=sums[1:])
        for length in sorted(lengths):
            if length <= len(part):
                count = len(part) - length + 1
                yield length, (sums[length:] - sums[:count]) * inverse[:count]


def _key(window: Sequence[str]) -> bytes:
    text = window if isinstance(window, str) else " ".join(window)
    return blake3(text.encode(errors="replace")).digest(16)
