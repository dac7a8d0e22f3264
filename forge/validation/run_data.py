"""The data that a checkpoint was trained on, with verified digests."""

from __future__ import annotations

from functools import cached_property

from forge.core.config import ResolvedConfig
from forge.core.paths import tokenizer_folder, tokens_folder
from forge.data.sources import Tokens, open_tokens
from forge.data.tokenizer import LoadedTokenizer, load_tokenizer


class Data:
    """Shards and tokenizer of a config. Digests are verified on first access, once for all checkpoints
    of a run. Raises DataError."""

    def __init__(self, config: ResolvedConfig) -> None:
        self._tokens = tokens_folder(config.data, config.ids.tokens)
        self._tokenizer = tokenizer_folder(config.data, config.ids.tokenizer)

    @cached_property
    def shards(self) -> Tokens:
        tokens = open_tokens(self._tokens)
        tokens.verify()
        return tokens

    @cached_property
    def tokenizer(self) -> LoadedTokenizer:
        return load_tokenizer(self._tokenizer)
