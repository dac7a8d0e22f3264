"""Documents to arrays of token ids: the one function that faster encoders can stand in for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from forge.tokenizer import LoadedTokenizer

# Enough text for a call to be worth its overhead. While the library encodes it holds about 130
# bytes per byte of text (measured, English and Python), so this is what bounds a worker's memory.
BATCH_BYTES = 2**20

# Between the only newline after a word and the next word, no pattern of ByteLevel reaches across:
# its words hold no white space, and "\n" alone is one word whether the text ends there or goes on.
BOUNDARY = re.compile(r"(?<=\S\n)(?=\S)")

Ids = NDArray[np.uint32]
# Ids of each document, in order, without special tokens.
Encode = Callable[[list[str]], list[Ids]]


def reference_encoder(tokenizer: LoadedTokenizer) -> Encode:
    """The tokenizers library itself: what every other encoder must agree with.

    A long document is encoded in pieces where the tokenizer allows that without other ids.
    """
    divisible = _is_divisible(tokenizer)

    def encode(documents: list[str]) -> list[Ids]:
        ids: list[list[Ids]] = [[] for _ in documents]
        pieces = (
            (number, piece)
            for number, document in enumerate(documents)
            for piece in (_pieces(document) if divisible else [document])
        )
        for batch in _batches(pieces):
            texts = [piece for _, piece in batch]
            encodings = tokenizer.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            for (number, _), encoding in zip(batch, encodings, strict=True):
                ids[number].append(np.array(encoding.ids, dtype=np.uint32))
        return [np.concatenate(parts) for parts in ids]

    return encode


def _is_divisible(tokenizer: LoadedTokenizer) -> bool:
    """Whether words end at a BOUNDARY: plain ByteLevel, as our own and GPT-2's; others may not."""
    parts = json.loads(tokenizer.tokenizer.to_str())
    words = parts["pre_tokenizer"] or {}
    return (
        words.get("type") == "ByteLevel"
        and words.get("use_regex", True)
        and not words.get("add_prefix_space")
        and parts["normalizer"] is None
        and all(token["special"] for token in parts["added_tokens"])
    )


def _pieces(document: str) -> Iterator[str]:
    start = 0
    while found := BOUNDARY.search(document, start + BATCH_BYTES):
        yield document[start : found.start()]
        start = found.start()
    yield document[start:]


def _batches(pieces: Iterator[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    batch: list[tuple[int, str]] = []
    num_bytes = 0
    for number, piece in pieces:
        batch.append((number, piece))
        num_bytes += len(piece.encode())
        if num_bytes >= BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch
