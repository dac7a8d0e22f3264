"""Losses without training: on the validation splits, and on the reference batches of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch

from forge.checkpoint.manifest import ReferenceLosses
from forge.core.records import BitsPerByte, TextBytes
from forge.data.loader import eval_batches, split
from forge.data.windows import Windows
from forge.trainer.numerics import REFERENCE_SAMPLES, reference_batch
from forge.trainer.parallel import ParallelModel
from forge.trainer.source_mix import MixAtStart, bits_per_byte, mean_loss


@dataclass(frozen=True)
class Measured:
    """An evaluation. losses: mean loss by source in nats per token; of a single corpus under ""."""

    losses: dict[str, float]
    loss: float
    bpb: BitsPerByte | None
    has_sources: bool

    @property
    def is_finite(self) -> bool:
        return all(map(math.isfinite, self.losses.values()))

    @property
    def keys(self) -> dict[str, Any]:
        """Keys of a metrics line and of an event."""
        sources = self.losses if self.has_sources else None
        return {"loss": self.loss, "sources": sources, **BitsPerByte.keys(self.bpb)}

    @property
    def by_source(self) -> str:
        """`code 2.1034, web 3.5120`; of a single corpus the loss alone."""
        return ", ".join(f"{name} {loss:.4f}".strip() for name, loss in self.losses.items())

    def __str__(self) -> str:
        by_source = f" ({self.by_source})" if self.has_sources else ""
        return f"{self.loss:.4f}{by_source}" + (f", {self.bpb}" if self.bpb else "")

    @classmethod
    def of(
        cls,
        losses: dict[str, float],
        text_bytes: Mapping[str, TextBytes],
        mix: MixAtStart | None,
        step: int,
    ) -> Self:
        """losses: by source. text_bytes: of the windows by source; {} where not known. mix: None without
        sources. step: after which they were measured."""
        bpb = bits_per_byte(losses, text_bytes, mix, step)
        return cls(losses, mean_loss(losses, mix, step), bpb, mix is not None)


@torch.no_grad()
def measured(
    parallel: ParallelModel,
    windows: Mapping[str, Windows],
    text_bytes: Mapping[str, TextBytes],
    mix: MixAtStart | None,
    step: int,
) -> Measured:
    """Evaluate on train.eval_samples fixed validation windows of each source, split among the ranks. All
    ranks call it. Other arguments: as of `Measured.of`."""
    parallel.decoder.eval()
    sums = [number for of_source in windows.values() for number in _loss_sum(parallel, of_source)]
    parallel.decoder.train()
    table = parallel.world.gather(sums, "validation losses")
    totals = [sum(column) for column in zip(*table, strict=True)]
    means = (loss / max(1.0, n) for loss, n in zip(totals[::2], totals[1::2], strict=True))
    return Measured.of(dict(zip(windows, means, strict=True)), text_bytes, mix, step)


def _loss_sum(parallel: ParallelModel, windows: Windows) -> tuple[float, float]:
    """Loss over this rank's share, summed over targets, and their number."""
    world = parallel.world
    total, num_targets = 0.0, 0
    for inputs, targets, tokens, learned in eval_batches(
        windows,
        parallel.settings.eval_samples,
        rank=world.rank.rank,
        world_size=world.rank.world_size,
        micro=parallel.micro_size,
    ):
        total += parallel.loss(inputs, targets) * tokens
        num_targets += learned
    return total, float(num_targets)


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
