"""Prefetching: the next batch is gathered into pinned memory while the device computes."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch

from forge.data.loader import Loader

Batch = tuple[torch.Tensor, torch.Tensor]


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
