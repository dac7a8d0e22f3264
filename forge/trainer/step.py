"""One training step: batch, gradients, clipping, learning rate, the update of the weights, and the flags
that the ranks exchange with it.

On a GPU the host runs ahead of the device: a step is launched without waiting for its results, and its
loss, and what the ranks tell each other with it, are read while the next step runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from forge.core import failpoints
from forge.core.events import STOP_CAUSES
from forge.core.train_settings import Train
from forge.data.loader import Loader, Prefetcher
from forge.data.sample_order import MixedOrder
from forge.data.sources import Tokens
from forge.data.windows import joined_windows
from forge.launch.heartbeat import heartbeat
from forge.launch.process_group import World, named
from forge.trainer import optim
from forge.trainer.divergence import SpikeRule, Verdict, not_finite
from forge.trainer.parallel import ParallelModel


class Flags(NamedTuple):
    """The flags that one rank sends to the others."""

    stop_cause: str  # one of STOP_CAUSES; "" to continue
    checkpoint_overdue: bool  # by its clock
    save_done: bool  # it has written its part of the save in progress

    @property
    def numbers(self) -> list[float]:
        """The flags as numbers, for a collective."""
        return [
            float(STOP_CAUSES.index(self.stop_cause)),
            float(self.checkpoint_overdue),
            float(self.save_done),
        ]


class Agreement(NamedTuple):
    """Decisions that all ranks share."""

    stop_cause: str = (
        ""  # the one that comes last in STOP_CAUSES of all ranks' causes; "" to continue
    )
    checkpoint_overdue: bool = False  # by the clock of rank 0
    save_done: bool = False  # all ranks have written their part of the save in progress

    @classmethod
    def of(cls, table: Sequence[Sequence[float]]) -> Agreement:
        """table: Flags.numbers of each rank, by rank."""
        return cls(
            stop_cause=STOP_CAUSES[int(max(row[0] for row in table))],
            checkpoint_overdue=bool(table[0][1]),
            save_done=all(row[2] for row in table),
        )


@dataclass(frozen=True)
class StepResult:
    """Results of a step, equal on all ranks.

    step: counted from 0. loss: mean over ranks. grad_norm: over all parameters, before clipping.
    trouble: which loss or gradient norm is not finite, or a spike; the update was then left out.
    is_spike: false where one is not finite. flags: those of each rank, by rank.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    trouble: str
    is_spike: bool
    flags: list[list[float]]


class LaunchedStep:
    """A step whose results may still be on their way from the device."""

    def __init__(
        self, step: int, lr: float, table: torch.Tensor, verdict: Verdict | None = None
    ) -> None:
        """table: loss, gradient norm and flags of each rank, on the device. verdict: with train.spike."""
        self._step, self._lr, self._verdict = step, lr, verdict
        # From a GPU into pinned memory (at::native::_to_copy), without waiting for the copy.
        self._table = table.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if table.is_cuda else None
        if self._copied:
            self._copied.record()

    def read(self) -> StepResult:
        """Wait until the step has been computed."""
        with named(f"results of step {self._step + 1}"):
            if self._copied:
                self._copied.synchronize()
        rows = self._table.tolist()
        broken = not_finite([row[:2] for row in rows])
        # As on the device: infinity is above each limit, but train.on_nonfinite decides about it.
        spike = "" if broken or self._verdict is None else self._verdict.read()
        return StepResult(
            self._step,
            loss=sum(row[0] for row in rows) / len(rows),
            grad_norm=max(row[1] for row in rows),
            lr=self._lr,
            trouble=broken or spike,
            is_spike=bool(spike),
            flags=[row[2:] for row in rows],
        )


@dataclass(frozen=True)
class TrainStep:
    """Computes training steps. All ranks call it, with the same step.

    optimizers: of the parameters of `parallel`. decay_steps: step from which on the learning
    rate is at its minimum. spikes: with train.spike.
    """

    parallel: ParallelModel
    optimizers: optim.Optimizers
    loader: Loader | Prefetcher
    decay_steps: int
    spikes: SpikeRule | None = None

    def __call__(self, step: int, flags: Callable[[], Sequence[float]] = list) -> LaunchedStep:
        """Train on the batch of a step, counted from 0.

        If the loss or the gradient norm of any rank is not finite, or the step is a spike, no rank
        updates weights or optimizer state; the device decides that. flags: numbers of this rank that
        all shall read with the result, exactly representable in fp32; asked for as late as possible.
        """
        settings, world = self.parallel.settings, self.parallel.world
        # Dropout depends on (seed, step, rank) only, so a resumed run draws the same masks.
        torch.manual_seed(_dropout_seed(settings.seed, step, world.rank.rank))
        lr = optim.learning_rate(step, settings, self.decay_steps)
        optim.set_learning_rate(self.optimizers, lr)
        batch = self._read(step)
        with named(f"all-reduce of gradients in step {step + 1}"):
            loss = self.parallel.backward(*batch)
            grad_norm = self.parallel.gradient_norm()
        own_numbers = torch.cat([torch.stack([loss, grad_norm]), world.on_device(flags())])
        table = world.gather_on_device(own_numbers, f"losses of step {step + 1}")
        verdict = self.spikes.judge(table[:, :2]) if self.spikes else None
        is_bad = ~table[:, :2].isfinite().all()
        optim.update(
            self.optimizers,
            grad_norm,
            largest=settings.grad_clip,
            unless=is_bad | verdict.is_spike if verdict else is_bad,
        )
        return LaunchedStep(step, lr, table, verdict)

    def _read(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's inputs and targets of a step, int64 [B / W, seq_len]."""
        heartbeat.begin_step(step + 1)
        failpoints.reach("data.read")
        return self.loader.batch(step)


def train_loader(
    tokens: Tokens, settings: Train, world: World, order: MixedOrder | None = None
) -> Loader | Prefetcher:
    """This rank's batches. order: of the samples of several sources. DataError if no shard holds a
    sequence, ConfigError if the ranks cannot share a batch."""
    loader = Loader(
        joined_windows(tokens, settings.seq_len),
        seed=settings.seed,
        batch_size=settings.batch_size,
        rank=world.rank.rank,
        world_size=world.rank.world_size,
        mixed=order,
    )
    return Prefetcher(loader, world.device) if world.device.type == "cuda" else loader


def _dropout_seed(seed: int, step: int, rank: int) -> int:
    """A 63-bit seed, different for each step and rank of a run with up to 2^12 ranks.

    The generator of a CPU takes its low 32 bits alone: there, masks repeat after 2^20 steps, and those of
    two runs differ only where one `seed` is even and the other odd.
    """
    return (seed << 31) ^ (step << 12) ^ rank
