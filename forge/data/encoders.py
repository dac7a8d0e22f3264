"""Encoders: documents to arrays of token ids, with the tokenizers library or, faster, gigatoken."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import psutil
from numpy.typing import NDArray

from forge.core.errors import DataError
from forge.core.files import grouped
from forge.data.tokenizer import LoadedTokenizer

# Amortizes the overhead of a call. While encoding, the library needs about 130 bytes per byte of text
# (measured, English and Python), so this bounds a worker's memory.
BATCH_BYTES = 2**20

# No word of ByteLevel's pattern spans a single newline between two words: words have no white space,
# and "\n" is a word of its own whether or not text follows.
BOUNDARY = re.compile(r"(?<=\S\n)(?=\S)")

# gigatoken caches every word, without a limit (7 bytes per byte of new words, measured). It is loaded
# again when this process has grown by this much, which takes 0.1 s.
MEMORY_BYTES = 2**29

# The tokenizers library is about 100 times slower, so only samples are compared: the first characters
# that a process encodes (30 ms), then an excerpt in every CHECK_EVERY characters (1 % of the time).
CHECK_FIRST = 2**15
CHECK_EVERY = 2**22
EXCERPT = 512

# Text on which pre-tokenizers differ: contractions, runs of white space, digits and signs, scripts,
# combining marks, joined emoji, the first and last character of each length in UTF-8.
PROBE = (
    "I'll they'Ve we're'll 'S \u2019s x='s'  \t a\n\n  b\r\n \r\n\n c \x0b\x0c\x1c\x85\xa0\u2003\u2028 d"
    "   1 12 123 1234567 ٣٤٥ ½ Ⅷ x2y3.14,000e-5 __init__ != >>> ... <|endoftext|> <|im_start|> "
    "naïve nai\u0308ve Grüße ΑΒΓ Ж世界、日本語 한국어 नमस्ते ไทย \u05d0\u05d1 👩\u200d🚀🏳️\u200d🌈 \ufeff "
    "\0\x7f\x80\u07ff\u0800\ud7ff\ue000\uffff\U00010000\U0010ffff\t\t\n "
)

# Characters that Unicode 17 has added: letters, digits or marks for gigatoken 0.10.0, and nothing yet for
# tokenizers 0.23 (measured for every character; tests/unit/data/test_encoders.py).
_ADDED = (
    "\u088f\u0c5c\u0cdc\ua7ce\ua7cf\ua7d2\ua7d4\ua7f1"
    "\U00010940-\U00010959\U00010ec5-\U00010ec7\U00011db0-\U00011ddb\U00011de0-\U00011de9"
    "\U00016ea0-\U00016eb8\U00016ebb-\U00016ed3\U00016ff2-\U00016ff6\U000187f8-\U000187ff"
    "\U00018d09-\U00018d1e\U00018d80-\U00018df2\U0001e6c0-\U0001e6ff\U0002b73a-\U0002b73f"
    "\U0002cea2-\U0002cead\U000323b0-\U00033479"
)
ADDED = re.compile(f"[{_ADDED}]")
# Five times faster, and true of every text with one of them.
_MAYBE_ADDED = re.compile(f"[{_ADDED[:8]}\U00010000-\U0010ffff]")

Ids = NDArray[np.uint32]
# Ids of each document, in order, without special tokens. Raises Unencodable.
Encode = Callable[[list[str]], list[Ids]]


class Unencodable(Exception):
    """A document that a tokenizer cannot turn into ids: its number in the call, and the reason."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(reason)
        self.number, self.reason = number, reason


def reference_encoder(tokenizer: LoadedTokenizer) -> Encode:
    """Encode with the tokenizers library, whose ids any other encoder must reproduce.

    A long document is encoded in pieces where that gives the same ids.
    """
    divisible = _is_divisible(tokenizer)

    def encode(documents: list[str]) -> list[Ids]:
        ids: list[list[Ids]] = [[] for _ in documents]
        pieces = (
            (number, piece)
            for number, document in enumerate(documents)
            for piece in (_pieces(document) if divisible else [document])
        )
        for batch in grouped(pieces, lambda piece: len(piece[1].encode()), BATCH_BYTES):
            for (number, _), encoding in zip(batch, _encodings(tokenizer, batch), strict=True):
                ids[number].append(np.array(encoding.ids, dtype=np.uint32))
        return [np.concatenate(parts) for parts in ids]

    return encode


def _encodings(tokenizer: LoadedTokenizer, batch: list[tuple[int, str]]) -> list[Any]:
    texts = [piece for _, piece in batch]
    try:
        encodings: list[Any] = tokenizer.for_text.encode_batch_fast(texts, add_special_tokens=False)
        return encodings
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException:  # the library raises plain Exception, and panics of Rust
        for number, piece in batch:
            try:
                tokenizer.encode(piece)
            except DataError as err:
                raise Unencodable(number, err.what) from None
        raise


def refuse_end(tokenizer: LoadedTokenizer, documents: list[str], encoded: list[Ids]) -> NoReturn:
    """Raise Unencodable for the first document whose ids contain the end-of-text id, as one does.

    `LoadedTokenizer.for_text` keeps text from becoming a special token, but some vocabularies have no
    other id for it: where the token is one character, or stands for all unknown words. NoFastEncoder
    where only gigatoken gives this id.
    """
    number = next(n for n, ids in enumerate(encoded) if tokenizer.eos_id in ids)
    document = documents[number]
    encoding = tokenizer.encoding(document)
    if tokenizer.eos_id not in encoding.ids:
        reason = f"gigatoken gives other ids than tokenizers for a text with {document[:40]!r}"
        raise NoFastEncoder(reason, number=number, gives_other_ids=True)
    start, end = encoding.offsets[encoding.ids.index(tokenizer.eos_id)]
    raise Unencodable(
        number,
        f"its text {document[start:end][:40]!r} at character {start} becomes id "
        f"{tokenizer.eos_id} ({tokenizer.eos_token}), which ends a document",
    )


class NoFastEncoder(Exception):
    """gigatoken cannot be used for this tokenizer or, raised by an Encode, for a document; the message is
    the reason.

    number: of the document in the call. gives_other_ids: it was compared with the tokenizers library,
    and what it has encoded elsewhere may be wrong, too.
    """

    def __init__(self, reason: str, *, number: int = 0, gives_other_ids: bool = False) -> None:
        super().__init__(reason)
        self.number, self.gives_other_ids = number, gives_other_ids


@contextmanager
def _gigatoken_may_fail(action: str) -> Iterator[None]:
    """Turn any error of gigatoken into NoFastEncoder."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as err:  # a Rust panic is not an Exception
        reason = next(iter(str(err).splitlines()), "")  # the other lines are a Rust traceback
        raise NoFastEncoder(f"gigatoken cannot {action} ({type(err).__name__}: {reason})") from None


def fast_encoder(tokenizer: LoadedTokenizer) -> Encode:
    """Encode with gigatoken; samples of its ids are compared with those of `reference_encoder`.

    Raises NoFastEncoder, as does the encoder itself.
    """
    source = _plain_text_bpe(tokenizer)
    with _gigatoken_may_fail("be imported"):
        import gigatoken
    with _gigatoken_may_fail("load this tokenizer"):
        unchecked = _Gigatoken(gigatoken.Tokenizer.from_json, source)
    reference = reference_encoder(tokenizer)
    of_same_unicode = _without_added(unchecked, reference)
    _compare(of_same_unicode, reference, PROBE)
    return _checked(of_same_unicode, reference)


def _plain_text_bpe(tokenizer: LoadedTokenizer) -> str:
    """The tokenizer's JSON without special tokens. NoFastEncoder where it is not a byte-level BPE."""
    parts = tokenizer.text_parts
    model, words = parts["model"], parts["pre_tokenizer"] or {}
    steps = words.get("pretokenizers", [words])
    last = steps[-1] if steps else {}
    if model["type"] != "BPE" or last.get("type") != "ByteLevel" or model.get("dropout"):
        raise NoFastEncoder("the tokenizer is not a byte-level BPE")
    if parts["normalizer"] not in (None, {"type": "NFC"}):
        raise NoFastEncoder("the tokenizer changes the text before it encodes")
    if not all(token["special"] for token in parts["added_tokens"]):
        raise NoFastEncoder("the tokenizer has added tokens that are found in plain text")
    return json.dumps(parts | {"added_tokens": []})


class _Gigatoken:
    """An Encode that bounds the memory of gigatoken's cache of words."""

    def __init__(self, load: Callable[[str], Any], source: str) -> None:
        self._load, self._source = load, source
        self._process = psutil.Process()
        self._start()

    def _start(self) -> None:
        self._tokenizer: Any = None  # frees the old cache before the new one grows
        self._tokenizer = self._load(self._source)
        self._most_bytes = self._process.memory_info().rss + MEMORY_BYTES

    def __call__(self, documents: list[str]) -> list[Ids]:
        if self._process.memory_info().rss > self._most_bytes:
            with _gigatoken_may_fail("load this tokenizer"):
                self._start()
        encoded: list[Ids] = []
        try:
            with _gigatoken_may_fail("encode a text"):
                # A loop is as fast as gigatoken's batches, and gives arrays.
                for document in documents:
                    encoded.append(self._tokenizer.encode(document))
        except NoFastEncoder as err:
            err.number = len(encoded)
            raise
        return encoded


def _without_added(fast: Encode, reference: Encode) -> Encode:
    """Encode documents with ADDED characters with `reference`, all others with `fast`."""

    def has_added(text: str) -> bool:
        return not text.isascii() and bool(_MAYBE_ADDED.search(text) and ADDED.search(text))

    def encode(documents: list[str]) -> list[Ids]:
        if not any(map(has_added, documents)):
            return fast(documents)
        encoded: list[Ids] = []
        for number, document in enumerate(documents):
            try:
                encoded += (reference if has_added(document) else fast)([document])
            except (NoFastEncoder, Unencodable) as err:
                err.number = number
                raise
        return encoded

    return encode


def _checked(fast: Encode, reference: Encode) -> Encode:
    first, since_last, num_checks = CHECK_FIRST, 0, 0

    def encode(documents: list[str]) -> list[Ids]:
        nonlocal first, since_last, num_checks
        for number, document in enumerate(documents):
            if first > 0:
                _compare(fast, reference, document[:first], number)
                first -= len(document)
            since_last += len(document)
            if since_last >= CHECK_EVERY:
                # Positions spread over the documents, and the same on every run.
                start = num_checks * 7919 * EXCERPT % max(1, len(document) - EXCERPT + 1)
                _compare(fast, reference, document[start : start + EXCERPT], number)
                since_last, num_checks = 0, num_checks + 1
        return fast(documents)

    return encode


def _compare(fast: Encode, reference: Encode, text: str, number: int = 0) -> None:
    """NoFastEncoder where the two do not agree. number: of the document that the text is from."""
    try:
        (expected,) = reference([text])
        (ids,) = fast([text])
    except Unencodable as err:
        reason = f"there is nothing to compare gigatoken with: {err.reason}"
        raise NoFastEncoder(reason, number=number) from None
    except NoFastEncoder as err:
        err.number = number
        raise
    if not np.array_equal(ids, expected):
        reason = f"gigatoken gives other ids than tokenizers for a text with {text[:40]!r}"
        raise NoFastEncoder(reason, number=number, gives_other_ids=True)


def _is_divisible(tokenizer: LoadedTokenizer) -> bool:
    """Return whether words end at a BOUNDARY: true of plain ByteLevel, as in trained tokenizers and
    GPT-2."""
    parts = tokenizer.text_parts
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
    while match := BOUNDARY.search(document, start + BATCH_BYTES):
        yield document[start : match.start()]
        start = match.start()
    yield document[start:]
