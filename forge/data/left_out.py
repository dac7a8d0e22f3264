"""Batches that are left out of the order of a run's samples, around loss spikes (train.spike=rewind)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # also for commands that have no use of it
    import numpy as np


@dataclass(frozen=True)
class LeftOut:
    """entries: (step, batches), in the order in which they were decided: from this step on, counted from
    0, so many batches more are left out."""

    entries: tuple[tuple[int, int], ...] = ()

    def batch(self, step: int) -> int:
        """The number of the batch that a step trains on; both count from 0."""
        return step + sum(batches for first, batches in self.entries if first <= step)

    def batches(self, steps: np.ndarray) -> np.ndarray:
        """As `batch`, of many steps, int64."""
        return steps + sum(batches * (steps >= first) for first, batches in self.entries)

    def stage_start(self, step: int) -> int:
        """The number of the first batch of a stage of train.mix that begins with this step. Batches that
        are left out from this very step on are of the stage."""
        return step + sum(batches for first, batches in self.entries if first < step)

    @property
    def total(self) -> int:
        """Number of batches that are left out, all together."""
        return sum(batches for _, batches in self.entries)
