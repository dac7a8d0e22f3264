"""Windows of tokens, which are the samples of a run: seq_len + 1 tokens of one shard, from each multiple
of seq_len on. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from forge.core.errors import DataError
from forge.core.process import raise_open_files
from forge.data.shards import Shard, Split
from forge.data.sources import Tokens


class WindowIndex:
    """The places of all windows of seq_len + 1 tokens in the shards, with consecutive indices. Opens no
    shard.

    Raises DataError where no shard has one. split: the name of the shards in that message.
    """

    def __init__(self, shards: Sequence[Shard], seq_len: int, *, split: str = "train") -> None:
        counts = [shard.num_windows(seq_len) for shard in shards]
        self.ends = np.cumsum(counts)
        self.starts = self.ends - counts
        self.num_samples = sum(counts)
        self.seq_len = seq_len
        if not self.num_samples:
            raise _no_window(shards, seq_len, split)
        self.shards = shards

    def place(self, index: int) -> tuple[Shard, int]:
        """Shard of a window, and its first token there."""
        number = int(self.ends.searchsorted(index, side="right"))
        return self.shards[number], int(index - self.starts[number]) * self.seq_len


def _no_window(shards: Sequence[Shard], seq_len: int, split: str) -> DataError:
    sizes = [shard.num_tokens for shard in shards]
    trouble = (
        f"no {split} shard holds one sequence: train.seq_len is {seq_len} and needs {seq_len + 1}"
        f" tokens, the longest of {len(shards)} shards has {max(sizes, default=0)}"
    )
    if sum(sizes) > seq_len:
        return DataError(
            trouble,
            cause=f"they have {sum(sizes)} tokens together, but a sequence is of one shard, and each part"
            " of the text (tokenize.part_mib) has shards of its own",
            fix="raise tokenize.part_mib, or lower train.seq_len",
        )
    return DataError(
        trouble,
        cause="the corpus is too small, or almost all of it went to the other split",
        fix="add text, lower train.seq_len or change tokenize.val_fraction",
    )


class Windows(WindowIndex):
    """The windows of an index, in shards that stay open from now on: what is read is what was there when
    they were verified. Raises as WindowIndex."""

    def __init__(self, shards: Sequence[Shard], seq_len: int, *, split: str = "train") -> None:
        super().__init__(shards, seq_len, split=split)
        raise_open_files()  # a shard is one, and a corpus may have 10,000
        self._views = [
            _window_view(shard.read(), seq_len) if shard.num_windows(seq_len) else None
            for shard in shards
        ]

    def gather(self, indices: np.ndarray) -> np.ndarray:
        """The windows with these indices, in this order, as int64 [len(indices), seq_len + 1]. ~id, which
        is negative, stands for a token that is read and never learned."""
        windows = np.empty((len(indices), self.seq_len + 1), np.int64)
        shard_of = self.ends.searchsorted(indices, side="right")
        for shard in set(shard_of.tolist()):
            rows = shard_of == shard
            windows[rows] = self._views[shard][indices[rows] - self.starts[shard]]
            if masked_from := self.shards[shard].masked_from:
                found = windows[rows]
                windows[rows] = np.where(found < masked_from, found, ~(found - masked_from))
        return windows


def _window_view(tokens: np.ndarray, seq_len: int) -> np.ndarray:
    """The windows of a shard as overlapping rows of a view, without copying or reading tokens."""
    plain = np.asarray(tokens)  # slicing a memmap costs microseconds each time
    return np.lib.stride_tricks.sliding_window_view(plain, seq_len + 1)[::seq_len]


def windows_by_source(tokens: Tokens, split: Split, seq_len: int) -> dict[str, Windows]:
    """The windows of a split, sorted by source; a single corpus has no name. DataError where a source has
    none."""
    return {
        name: Windows(getattr(shards, split), seq_len, split=f"{name} {split}".strip())
        for name, shards in tokens.by_source.items()
    }


def joined_windows(tokens: Tokens, seq_len: int) -> Windows:
    """The windows of all training splits, numbered through the sources."""
    shards = [shard for of_source in tokens.by_source.values() for shard in of_source.train]
    return Windows(shards, seq_len)


def spread_over_sources(windows: Mapping[str, Windows], numbers: np.ndarray) -> np.ndarray:
    """A window for each number, from all sources in turn, int64 [len(numbers), seq_len + 1]. A source
    that has no more windows begins again."""
    of_source = list(windows.values())
    rows = []
    for number in numbers.tolist():
        turn, source = divmod(number, len(of_source))
        rows.append(of_source[source].gather(np.array([turn % of_source[source].num_samples])))
    return np.concatenate(rows)
