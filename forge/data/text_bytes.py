"""Bytes of the original text that token ids stand for, by which losses of different tokenizers compare.

`forge tokenize` writes beside each validation shard a file with the ending `.bytes`, outside of all
digests: for each id the bytes of text that it stands for, little-endian uint32. A character that is
divided among ids counts at the last of them. Text that the tokenizer loses counts at the id after it, or
at the last one of its document. The id that ends a document counts 0.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from forge.core.config import ResolvedConfig
from forge.core.errors import DataError, ForgeError
from forge.core.paths import STATISTICS, tokenizer_folder, tokens_folder
from forge.core.records import TextBytes
from forge.data.encoders import NoFastEncoder
from forge.data.lost_text import Spelling, keeps_all_text
from forge.data.plain_text import HIDDEN
from forge.data.sample_order import spread_evenly
from forge.data.shards import Bytes, Ids, Shard, ShardSet
from forge.data.sources import Tokens, open_tokens
from forge.data.statistics import Statistics, read_statistics
from forge.data.tokenizer import LoadedTokenizer, load_tokenizer
from forge.data.windows import WindowIndex


class ByteCounter:
    """Counts the bytes of text of each id of a document."""

    def __init__(self, tokenizer: LoadedTokenizer, spelling: Spelling) -> None:
        self._tokenizer = tokenizer
        self._spelled = _spelled_bytes(spelling, tokenizer)
        self._keeps_all = keeps_all_text(tokenizer)

    def __call__(self, document: str, ids: Ids) -> Bytes:
        """Bytes of each id, and of the end of the document: shape [len(ids) + 1]. NoFastEncoder where
        tokenizers has other ids for the document."""
        text = np.frombuffer(document.encode(), np.uint8)
        ends = np.cumsum(self._spelled[ids])
        if not (self._keeps_all and ends[-1:] == len(text)):  # else a normalizer changed the text
            ends = self._ends_by_offsets(document, ids)
        ends = _starts_of_characters(text)[ends]
        ends[-1:] = len(text)
        return np.diff(ends, prepend=0, append=len(text)).astype(np.uint32)

    def _ends_by_offsets(self, document: str, ids: Ids) -> NDArray[np.int64]:
        """Number of bytes before the end of each id's text, or before the next id's, which comes earlier
        where both have a part of a character."""
        encoding = self._tokenizer.encoding(document)
        if not np.array_equal(encoding.ids, ids):
            reason = f"gigatoken gives other ids than tokenizers for a text with {document[:40]!r}"
            raise NoFastEncoder(reason, gives_other_ids=True)
        starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        ends[:-1] = np.minimum(ends[:-1], starts[1:])
        codes = np.frombuffer(document.encode("utf-32-le"), np.uint32)
        widths = 1 + (codes > 0x7F) + (codes > 0x7FF) + (codes > 0xFFFF)
        return np.cumsum(np.append(0, widths))[np.maximum.accumulate(ends)]


def _starts_of_characters(text: NDArray[np.uint8]) -> NDArray[np.int64]:
    """For each position in a text in UTF-8, its end too, the start of the character that it is in."""
    inside = np.append((text & 0xC0) == 0x80, False)
    return np.maximum.accumulate(np.where(inside, 0, np.arange(len(inside))))


def _spelled_bytes(spelling: Spelling, tokenizer: LoadedTokenizer) -> NDArray[np.int64]:
    """Bytes of text that each id spells, by the vocabulary alone: shape [vocab_size]. Special tokens,
    which no text becomes (`for_plain_text`), spell none."""
    spelled = zip(spelling.characters, spelling.bytes, strict=True)
    sizes = np.array([len(text.encode()) + len(rest) for text, rest in spelled], np.int64)
    added = tokenizer.text_parts["added_tokens"]
    sizes[[token["id"] for token in added if HIDDEN in token["content"]]] = 0
    sizes[tokenizer.eos_id] = 0
    return sizes


# --- validation windows -----------------------------------------------------------------------------


def of_run(config: ResolvedConfig) -> dict[str, TextBytes]:
    """Bytes of the windows on which a run is evaluated, as `by_source`; {} where its tokens cannot be
    read: ranks may have copies, and say what is wrong with them."""
    try:
        tokens = open_tokens(tokens_folder(config.data, config.ids.tokens))
        return by_source(tokens, config.data, config.train.seq_len, config.train.eval_samples)
    except DataError:
        return {}


def by_source(tokens: Tokens, data: str, seq_len: int, count: int) -> dict[str, TextBytes]:
    """Targets and bytes, by source, of the windows that `loader.eval_batches` takes for this `count`.

    They are kept in statistics.json of each source. Without `.bytes` files, as for files of ids, bytes
    are estimated by the vocabulary; the key of estimates ends with ~, since those of earlier versions
    counted the names of special tokens. data: the directory of tokenizers and tokens. Raises DataError.
    """
    return {name: _kept(one, data, seq_len, count) for name, one in tokens.by_source.items()}


def _kept(shards: ShardSet, data: str, seq_len: int, count: int) -> TextBytes:
    statistics, key = read_statistics(shards.folder) or Statistics(), f"{count}x{seq_len}"
    before, estimate = statistics.validation.get(key), statistics.validation.get(f"{key}~")
    if found := before if before and not before.estimated else estimate:
        return found
    found = _measured(shards, data, seq_len, count)
    key += "~" * found.estimated
    kept = {"validation": statistics.validation | {key: found}}
    with suppress(ForgeError):  # a directory that is only read
        statistics.model_copy(update=kept).write(shards.folder / STATISTICS)
    return found


def _measured(shards: ShardSet, data: str, seq_len: int, count: int) -> TextBytes:
    estimated = not all(map(_has_bytes, shards.val))
    if estimated:
        tokenizer = load_tokenizer(tokenizer_folder(data, shards.manifest.tokenizer_id))
        spelled = _spelled_bytes(Spelling(tokenizer), tokenizer)
    windows = WindowIndex(shards.val, seq_len, split="val")
    chosen = spread_evenly(windows.num_samples, count)
    total, num_targets = 0, len(chosen) * seq_len
    for shard, first in map(windows.place, chosen):
        targets = slice(first + 1, first + 1 + seq_len)
        if estimated:
            ids = shard.read()[targets]
            learned = ids[ids < shards.vocab_size]
            num_targets -= len(ids) - len(learned)
            total += int(spelled[learned].sum())
        else:
            total += int(_written_bytes(shard)[targets].sum())
    return TextBytes(targets=num_targets, bytes=total, estimated=estimated)


def _has_bytes(shard: Shard) -> bool:
    """Return whether the shard has its `.bytes` file, with as many entries as ids."""
    path = shard.bytes_path
    return path.is_file() and path.stat().st_size == 4 * shard.num_tokens


def _written_bytes(shard: Shard) -> Bytes:
    """The `.bytes` file of a shard. A map has an open file, and a corpus more shards than may be open."""
    return np.memmap(shard.bytes_path, np.dtype("<u4"), mode="r", shape=(shard.num_tokens,))
