"""Packing of whole conversations into windows."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

import numpy as np

from forge.core.errors import DataError
from forge.core.tokenize_settings import Tokenize
from forge.data.encoders import Ids
from forge.data.tokenizer import LoadedTokenizer
from forge.plugins.chat.conversations import documents, encoder
from forge.plugins.chat.template import parse

__all__ = ["Packing", "documents", "plain_text"]


def plain_text(document: str) -> str:
    """The contents of the messages of a conversation, a line between two."""
    return "\n".join(message.content for message in parse(document) or ())


class Packing:
    """The packing of conversations, as `data.packing` has it, and counts of those that are not whole.
    ConfigError for a tokenizer that the format cannot use."""

    def __init__(self, tokenizer: LoadedTokenizer, settings: Tokenize) -> None:
        assert settings.seq_len
        self._seq_len, self._end = settings.seq_len, tokenizer.vocab_size + tokenizer.eos_id
        self._vocab_size, self._cuts = tokenizer.vocab_size, settings.too_long == "cut"
        self._encode = encoder(tokenizer)
        self._cut = self._left_out = 0

    def __call__(self, document: str) -> tuple[Ids, Ids | None]:
        """Ids of a document, and what shards have of it, its end included; None where no token of that
        would be learned. Raises DataError."""
        ids, learned = self._encode(document)
        if len(ids) >= self._seq_len:
            if not self._cuts:
                raise DataError(
                    f"it has {len(ids) + 1:,} tokens with its end, and tokenize.seq_len is"
                    f" {self._seq_len:,}",
                    fix="raise train.seq_len and tokenize.seq_len, leave it out, or set"
                    " tokenize.too_long: cut",
                )
            self._cut += 1
        whole = ids
        ids, learned = ids[: self._seq_len - 1], learned[: self._seq_len - 1]
        if not learned.any():
            self._left_out += 1
            return whole, None
        marked = np.where(learned, ids, ids + self._vocab_size)
        return whole, np.append(marked, self._end).astype(np.uint32)

    def blocks(self, documents: Sequence[Ids]) -> Iterator[tuple[Ids, int]]:
        """The documents in blocks of seq_len ids, filled up with ends, and how many each holds.

        Best fit in the order of falling lengths: each goes into the fullest block that holds it ("Fewer
        Truncations Improve Language Modeling", arXiv 2404.10830).
        """
        held: list[list[Ids]] = []
        free: list[tuple[int, int]] = []  # ids that a block has room for, and its number; ascending
        for document in sorted(documents, key=len, reverse=True):
            place = bisect_left(free, (len(document), 0))
            room, number = free.pop(place) if place < len(free) else (self._seq_len, len(held))
            if number == len(held):
                held.append([])
            held[number].append(document)
            insort(free, (room - len(document), number))
        for room, number in free:
            rest = np.full(room, self._end, np.uint32)
            yield np.concatenate([*held[number], rest]), len(held[number])

    def warning(self, names: str, count: int) -> str:
        """Sentence on what was cut and left out of `count` documents; "" for nothing. names: of files."""
        told = [
            *([f"{self._cut:,} cut after {self._seq_len:,} tokens"] if self._cut else []),
            *([f"{self._left_out:,} left out: no token is learned"] if self._left_out else []),
        ]
        return f"warning: {names}: of {count:,} documents {', '.join(told)}" if told else ""
