"""Packing: whole documents in windows, of which only some tokens are learned. Formats with
`TextFormat.special_tokens` have the class `Packing` in their module, which is used as `Packs` says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Protocol

from forge.core.tokenize_settings import Tokenize
from forge.data.corpus import text_format
from forge.data.encoders import Ids
from forge.data.tokenizer import LoadedTokenizer


class Packs(Protocol):
    """The packing of the documents of some files."""

    def __call__(self, document: str) -> tuple[Ids, Ids | None]:
        """Ids of a document, and what shards have of it (`shards.ShardManifest.masked`), with its end;
        None where no token of that would be learned. Raises DataError."""

    def blocks(self, documents: Sequence[Ids]) -> Iterator[tuple[Ids, int]]:
        """Blocks of tokenize.seq_len ids, as shards have them, and how many documents each holds.
        The first token of a block is never learned."""

    def warning(self, names: str, count: int) -> str:
        """Sentence on what was cut and left out of `count` documents; "" for nothing. names: of their
        files."""


def plain_text(document: str, settings: Tokenize) -> str:
    """The text of a document that is packed, without the marks of its format."""
    found: str = import_module(text_format(settings.format).module).plain_text(document)
    return found


def packing(tokenizer: LoadedTokenizer, settings: Tokenize) -> Packs:
    """Raises ConfigError for a tokenizer that the format cannot use."""
    found: Packs = import_module(text_format(settings.format).module).Packing(tokenizer, settings)
    return found
