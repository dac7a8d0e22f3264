"""How much of a checkpoint validation recomputes. No torch."""

from __future__ import annotations

# Ranks hold the same weights, so the losses of a few of them say as much as those of all.
MAX_RECOMPUTED = 8


def recomputed_ranks(world_size: int, most: int = MAX_RECOMPUTED) -> list[int]:
    """The ranks whose recorded losses are recomputed: the first, the last, and others spread evenly.

    most: how many at most; 1 is the first rank alone.
    """
    num_ranks = min(world_size, most)
    return [index * (world_size - 1) // max(1, num_ranks - 1) for index in range(num_ranks)]
