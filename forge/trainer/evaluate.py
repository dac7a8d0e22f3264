"""Losses without training: on the validation split, and on the reference batches of a checkpoint."""

from __future__ import annotations

import torch

from forge.checkpoint.manifest import ReferenceLosses
from forge.data.loader import Windows, eval_batches, split
from forge.trainer.numerics import REFERENCE_SAMPLES, reference_samples
from forge.trainer.parallel import ParallelModel


@torch.no_grad()
def validation_loss(parallel: ParallelModel, windows: Windows) -> float:
    """Mean loss over train.eval_samples fixed validation windows, split among the ranks. All ranks call
    it."""
    world = parallel.world
    parallel.decoder.eval()
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
    parallel.decoder.train()
    table = world.gather([total, float(tokens)], "validation losses")
    return sum(row[0] for row in table) / sum(row[1] for row in table)


@torch.no_grad()
def reference_losses(parallel: ParallelModel, windows: Windows) -> ReferenceLosses:
    """Loss of each rank on its reference batch, which validation recomputes. All ranks call it.

    windows: of the validation split.
    """
    world = parallel.world
    samples = reference_samples(windows.num_samples, world.rank.rank)
    parallel.decoder.eval()
    loss = parallel.loss(*split(windows.gather(samples)))
    parallel.decoder.train()
    losses = [row[0] for row in world.gather([loss], "reference losses")]
    return ReferenceLosses(samples=REFERENCE_SAMPLES, losses=losses)
