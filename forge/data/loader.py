"""Loader: the batch of each step, exact after a resume and with any world size.

A sample is a window (`data.windows`). The position in the data is one number: sample g of the run is
window permute(g mod n) of epoch g div n, where n is the number of windows; with several sources
`data.sample_order` says which window it is. Step s trains on batch s. So a checkpoint needs no loader
state.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from forge.core.train_settings import samples_per_rank
from forge.data.sample_order import MixedOrder, in_epochs, spread_evenly
from forge.data.windows import Windows

# Number of samples whose order is computed at a time: a call costs 0.2 ms, a sample 0.06 us.
SAMPLES_AT_ONCE = 2**14

Batch = tuple[torch.Tensor, torch.Tensor]


class Loader:
    """One rank's rows of each global batch.

    Rank r has rows [r B / W, (r + 1) B / W) of a batch of B samples over W ranks, so that the batch
    is the same for any world size. Raises ConfigError when W does not divide B.
    """

    def __init__(
        self,
        windows: Windows,
        *,
        seed: int,
        batch_size: int,
        rank: int,
        world_size: int,
        mixed: MixedOrder | None = None,
    ) -> None:
        """mixed: the order of several sources, whose windows are numbered as in `windows`."""
        self.windows, self.seed, self.batch_size = windows, seed, batch_size
        self.rank, self.rank_samples = rank, samples_per_rank(batch_size, world_size)
        self._mixed = mixed
        # About one epoch at most: with a tiny corpus a call would be for thousands of epochs.
        at_once = min(SAMPLES_AT_ONCE, windows.num_samples)
        if mixed:
            # Blocks are computed for all ranks, and a call should not be for a part of one.
            self._steps_at_once = max(1, max(at_once, mixed.largest_block) // batch_size)
        else:
            self._steps_at_once = max(1, at_once // self.rank_samples)
        self._first_step, self._order = 0, np.empty((0, self.rank_samples), np.int64)

    def sample_numbers(self, step: int, num_steps: int = 1) -> np.ndarray:
        """This rank's global sample numbers of `num_steps` steps, uint64 [num_steps, B / W]."""
        starts = np.arange(step, step + num_steps, dtype=np.uint64) * np.uint64(self.batch_size)
        first = self.rank * self.rank_samples
        return starts[:, None] + np.arange(first, first + self.rank_samples, dtype=np.uint64)

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's inputs and targets of a step, int64 [B / W, seq_len]; steps count from 0."""
        if not 0 <= step - self._first_step < len(self._order):
            self._first_step = step
            self._order = self._find_windows(self.sample_numbers(step, self._steps_at_once))
        return split(self.windows.gather(self._order[step - self._first_step]))

    def _find_windows(self, numbers: np.ndarray) -> np.ndarray:
        """The window index of each global sample number, int64, of the same shape."""
        if self._mixed:
            return self._mixed.windows(numbers)
        return in_epochs(numbers, size=self.windows.num_samples, seed=self.seed)


def eval_batches(
    windows: Windows, count: int, *, rank: int, world_size: int, micro: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, int, int]]:
    """This rank's share of `count` fixed windows: inputs, targets, and the numbers of tokens and of
    targets to count.

    The windows (all, if there are fewer than `count`) are spread evenly over the shards, and each is
    used once over all ranks. Every rank yields the same number of batches of at most `micro` rows,
    because FSDP2's forward waits for all ranks: a batch without a window repeats one and counts 0
    tokens. The loss is sum(loss * tokens) / sum(targets) over batches and ranks.
    """
    chosen = spread_evenly(windows.num_samples, count)
    num_batches = -(-len(chosen) // (world_size * micro))
    shares = np.array_split(chosen, num_batches * world_size)
    for indices in shares[rank::world_size]:
        inputs, targets = split(windows.gather(indices if len(indices) else chosen[:1]))
        num_tokens = len(indices) * windows.seq_len
        yield inputs, targets, num_tokens, min(num_tokens, num_targets(targets))


def split(windows: np.ndarray) -> Any:
    """Split windows [B, seq_len + 1] into inputs and targets, int64 [B, seq_len] each. A target is
    negative where the token is never learned."""
    tokens = torch.from_numpy(windows)
    inputs = torch.where(tokens < 0, ~tokens, tokens) if windows.min(initial=0) < 0 else tokens
    return inputs[:, :-1], tokens[:, 1:]


def num_targets(targets: torch.Tensor) -> int:
    """Number of the targets that are learned."""
    return int(torch.count_nonzero(targets >= 0))


class Prefetcher:
    """A loader's batches in pinned memory, from which a copy to the GPU does not stop the host.

    One thread gathers the batch after the one that was asked for last.
    """

    def __init__(self, loader: Loader, device: torch.device) -> None:
        self._loader, self._pinned = loader, device.type == "cuda"
        # A new thread has device 0, where pinning would create a context.
        prepare = (torch.cuda.set_device, (device,)) if self._pinned else (None, ())
        self._thread = ThreadPoolExecutor(1, "loader", *prepare)
        self._next: tuple[int, Future[Batch]] | None = None

    def batch(self, step: int) -> Batch:
        """The batch of a step, as Loader.batch gives it. Raises what the loader raised in the thread."""
        if self._next is None or self._next[0] != step:
            self._next = self._begin(step)
        wanted, self._next = self._next[1], self._begin(step + 1)
        return wanted.result()

    def _begin(self, step: int) -> tuple[int, Future[Batch]]:
        return step, self._thread.submit(self._gather, step)

    def _gather(self, step: int) -> Batch:
        inputs, targets = (tokens.contiguous() for tokens in self._loader.batch(step))
        if self._pinned:
            return inputs.pin_memory(), targets.pin_memory()
        return inputs, targets
