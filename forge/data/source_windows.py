"""The windows of a run's tokens, of a single corpus or of several sources."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from forge.data.loader import Windows
from forge.data.shards import Split
from forge.data.sources import Tokens


def windows_by_source(tokens: Tokens, split: Split, seq_len: int) -> dict[str, Windows]:
    """The windows of a split, sorted by source; a single corpus has no name. DataError where a source has
    none."""
    return {
        name: Windows(getattr(shards, split), seq_len, split=f"{name} {split}".strip())
        for name, shards in tokens.by_source.items()
    }


def joined(tokens: Tokens, seq_len: int) -> Windows:
    """The windows of all training splits, numbered through the sources."""
    shards = [shard for of_source in tokens.by_source.values() for shard in of_source.train]
    return Windows(shards, seq_len)


def spread(windows: Mapping[str, Windows], numbers: np.ndarray) -> np.ndarray:
    """A window for each number, from all sources in turn, int64 [len(numbers), seq_len + 1]. A source
    that has no more windows begins again."""
    of_source = list(windows.values())
    rows = []
    for number in numbers.tolist():
        turn, source = divmod(number, len(of_source))
        rows.append(of_source[source].gather(np.array([turn % of_source[source].num_samples])))
    return np.concatenate(rows)
