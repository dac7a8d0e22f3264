"""One training step: batch, gradients, clipping, learning rate, and the update of the weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from forge.core import failpoints
from forge.core.config import Train
from forge.data.loader import Loader, Windows
from forge.data.shards import ShardSet
from forge.launch.heartbeat import heartbeat
from forge.launch.process_group import named
from forge.launch.rank import Rank
from forge.trainer.nonfinite import Skipped, not_finite
from forge.trainer.optim import learning_rate
from forge.trainer.parallel import ParallelModel


@dataclass(frozen=True)
class StepResult:
    """Loss, gradient norm and learning rate of one step, and whether its update was applied."""

    loss: float  # mean over ranks
    grad_norm: float  # over all parameters, before clipping
    lr: float
    skipped: str = ""  # where the update was skipped: which loss or gradient norm is not finite
    fatal: str = ""  # where it may not be skipped: the same, and why not


@dataclass(frozen=True)
class TrainStep:
    """Computes training steps. All ranks call it, with the same step.

    optimizer: of the parameters of `parallel`. decay_steps: step from which on the learning rate is
    at its minimum. skipped: counters, updated by each step.
    """

    parallel: ParallelModel
    optimizer: torch.optim.Optimizer
    loader: Loader
    decay_steps: int
    skipped: Skipped

    def __call__(self, step: int) -> StepResult:
        """Train on the batch of a step, counted from 0.

        If the loss or the gradient norm of any rank is not finite, no rank updates weights or
        optimizer state. Where the result is `fatal`, the caller must not take another step.
        """
        settings, world = self.parallel.settings, self.parallel.world
        # Dropout depends on (seed, step, rank) only, so a resumed run draws the same masks.
        torch.manual_seed(_dropout_seed(settings.seed, step, world.rank.rank))
        lr = learning_rate(step, settings, self.decay_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        batch = self._read(step)
        with named(f"all-reduce of gradients in step {step + 1}"):
            local_loss = self.parallel.backward(*batch)
            grad_norm = self.parallel.clip_gradients(settings.grad_clip)
        table = world.gather([local_loss, grad_norm], f"losses of step {step + 1}")
        skipped = fatal = ""
        if trouble := not_finite(table):
            skipped, fatal = self._skip_update(trouble)
        else:
            self.optimizer.step()
            self.skipped.in_a_row = 0
        self.optimizer.zero_grad(set_to_none=True)
        loss = sum(row[0] for row in table) / len(table)
        return StepResult(loss, grad_norm, lr, skipped, fatal)

    def _read(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's inputs and targets of a step, int64 [B / W, seq_len]."""
        heartbeat.begin_step(step + 1)
        failpoints.reach("data.read")
        return self.loader.batch(step)

    def _skip_update(self, trouble: str) -> tuple[str, str]:
        """Count a step without its update, if the config allows that; `skipped` and `fatal` of the
        result.

        The first update of a run is never skipped: before it AdamW has no state to save.
        """
        refusal = self.skipped.refusal(self.parallel.settings)
        if not refusal and not self.optimizer.state:
            refusal = "the first update of a run cannot be skipped"
        if refusal:
            return "", f"{trouble}; {refusal}"
        self.skipped.steps += 1
        self.skipped.in_a_row += 1
        return trouble, ""


def train_loader(shards: ShardSet, settings: Train, rank: Rank) -> Loader:
    """This rank's batches. DataError if no shard holds a sequence, ConfigError if the ranks cannot
    share a batch."""
    return Loader(
        Windows(shards.train, settings.seq_len),
        seed=settings.seed,
        batch_size=settings.batch_size,
        rank=rank.rank,
        world_size=rank.world_size,
    )


def _dropout_seed(seed: int, step: int, rank: int) -> int:
    """A 63-bit seed, different for each step and rank of a run with up to 2^12 ranks."""
    return (seed << 31) ^ (step << 12) ^ rank
