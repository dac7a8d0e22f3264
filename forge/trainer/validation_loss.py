"""Losses without training: on the validation splits, and on the reference batches of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from forge.checkpoint.manifest import ReferenceLosses
from forge.data.loader import eval_batches, split
from forge.data.windows import Windows
from forge.trainer.numerics import REFERENCE_SAMPLES, reference_batch
from forge.trainer.parallel import ParallelModel


@torch.no_grad()
def validation_losses(parallel: ParallelModel, windows: Mapping[str, Windows]) -> dict[str, float]:
    """Mean loss over train.eval_samples fixed validation windows of each source, split among the ranks.
    All ranks call it."""
    parallel.decoder.eval()
    sums = [number for of_source in windows.values() for number in _loss_sum(parallel, of_source)]
    parallel.decoder.train()
    table = parallel.world.gather(sums, "validation losses")
    totals = [sum(column) for column in zip(*table, strict=True)]
    means = (loss / tokens for loss, tokens in zip(totals[::2], totals[1::2], strict=True))
    return dict(zip(windows, means, strict=True))


def _loss_sum(parallel: ParallelModel, windows: Windows) -> tuple[float, float]:
    """Loss over this rank's share, summed over tokens, and their number."""
    world = parallel.world
    total, tokens = 0.0, 0
    for inputs, targets, counted in eval_batches(
        windows,
        parallel.settings.eval_samples,
        rank=world.rank.rank,
        world_size=world.rank.world_size,
        micro=parallel.micro_size,
    ):
        total += parallel.loss(inputs, targets) * counted
        tokens += counted
    return total, float(tokens)


@torch.no_grad()
def reference_losses(parallel: ParallelModel, windows: Mapping[str, Windows]) -> ReferenceLosses:
    """Loss of each rank on its reference batch, which validation recomputes. All ranks call it.

    windows: of the validation splits, by source.
    """
    world = parallel.world
    parallel.decoder.eval()
    loss = parallel.loss(*split(reference_batch(windows, world.rank.rank)))
    parallel.decoder.train()
    losses = [row[0] for row in world.gather([loss], "reference losses")]
    return ReferenceLosses(samples=REFERENCE_SAMPLES, losses=losses)
