"""Divergence: a step whose loss or gradient norm is not finite, or a spike, ends the run or is skipped.

All ranks decide the same, from gathered numbers and from what the checkpoint records, so that a resumed
run decides as an uninterrupted one.

A step is a spike if its loss or gradient norm is more than train.spike_factor standard deviations above
the mean over the last train.spike_window steps that updated the weights. After SkipStepOptimizer of
OLMo-core (OLMo et al. 2025, "2 OLMo 2 Furious", arXiv:2501.00656). Two things are different: OLMo-core
also skips drops, and keeps spikes in the window, so that a loss that stays high is accepted after a
while. The device decides on spikes, without waiting for the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from forge.checkpoint import parent
from forge.checkpoint.manifest import Manifest
from forge.core.config import Config
from forge.core.errors import TrainingError
from forge.core.train_settings import Train


@dataclass
class SkippedCounts:
    """Number of steps without an update: in the run, and in a row up to now."""

    steps: int = 0
    in_a_row: int = 0

    @classmethod
    def of(cls, manifest: Manifest) -> SkippedCounts:
        """The counters in a checkpoint's manifest."""
        return cls(manifest.skipped.steps, manifest.skipped.in_a_row)

    def count(self, trouble: str, settings: Train, *, is_spike: bool = False) -> str:
        """Count a step, whose update was left out if there is `trouble`. Why training must end; empty if
        it continues."""
        if not trouble:
            self.in_a_row = 0
            return ""
        policy = settings.spike if is_spike else settings.on_nonfinite
        if refusal := self._refusal(policy, settings):
            return f"{trouble}; {refusal}"
        self.steps += 1
        self.in_a_row += 1
        return ""

    def _refusal(self, policy: str | None, settings: Train) -> str:
        """Why the update of a step may not be skipped; empty if it may.

        The limit is on steps in a row: single bad batches should not end a long run, while with
        broken weights every step fails.
        """
        if policy == "stop":
            return "the weights were not updated"
        if self.in_a_row >= settings.max_skipped_steps:
            return (
                f"the {self.in_a_row} steps before it were skipped already"
                f" (train.max_skipped_steps is {settings.max_skipped_steps})"
            )
        return ""


def not_finite(table: Sequence[Sequence[float]]) -> str:
    """The first rank whose loss or gradient norm is not finite, as a sentence; empty if there is none.

    table: loss and gradient norm of each rank.
    """
    for rank, (loss, norm) in enumerate(table):
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return f"loss {loss} and gradient norm {norm} on rank {rank} are not finite"
    return ""


def diverged(config: Config, what: str, *, step: int, lr: float, saved_step: int) -> TrainingError:
    """The error that ends training. what: a sentence on the number that is not finite.

    step: in which it happened, counted from 1. lr: of that step. saved_step: of the newest checkpoint, 0
    without one.
    """
    return TrainingError(
        f"step {step}: {what}",
        cause=f"a learning rate too high (train.lr is {config.train.lr:.2g}, this step's rate was"
        f" {lr:.2g}), or broken data",
        fix=f"{parent.fix_for_divergence(config, saved_step)}; where single batches are the cause,"
        " train.on_nonfinite=skip continues without their updates",
    )


NAMES = ("loss", "gradient norm")


class Verdict:
    """Verdict on a step, a spike or not. `is_spike` is on the device, and false where a number is not
    finite."""

    def __init__(self, is_spike: torch.Tensor, numbers: torch.Tensor, factor: float) -> None:
        """numbers: value, mean, standard deviation and limit of each of NAMES, fp32 [4, 2]."""
        self.is_spike, self._factor = is_spike, factor
        self._numbers = numbers.to("cpu", non_blocking=True)

    def read(self) -> str:
        """A sentence on the spike; empty if there is none. Only after the device has done the step."""
        for name, value, mean, deviation, limit in zip(NAMES, *self._numbers.tolist(), strict=True):
            if value > limit:
                return (
                    f"the {name} {value:.4g} is a spike, above {limit:.4g} (mean {mean:.4g} of the steps"
                    f" before, and {self._factor:g} standard deviations of {deviation:.3g})"
                )
        return ""


class SpikeRule:
    """The rule with its window: loss and gradient norm of the last accepted steps, oldest first.

    Empty rows, which are NaN, come first. Until half of the window is full no step is a spike.
    """

    def __init__(
        self, settings: Train, device: torch.device, recorded: list[list[float]] | None = None
    ) -> None:
        """recorded: of a checkpoint, as `recorded` returns them."""
        size = settings.spike_window
        rows = (recorded or [])[-size:]
        empty = [[torch.nan, torch.nan]] * (size - len(rows))
        self._window = torch.tensor([*empty, *rows], dtype=torch.float32, device=device)
        self._factor, self._needed = settings.spike_factor, size // 2

    @classmethod
    def of(
        cls, settings: Train, device: torch.device, manifest: Manifest | None
    ) -> SpikeRule | None:
        """The rule as it was at a checkpoint, or at the start of a run; None without train.spike."""
        if settings.spike is None:
            return None
        return cls(settings, device, manifest.spike_window if manifest else None)

    def judge(self, table: torch.Tensor) -> Verdict:
        """Judge whether a step is a spike; if it is not, and all is finite, its numbers enter the window.

        table: loss and gradient norm of each rank, fp32 [W, 2]. In fp64 a mean of fp32 numbers is
        nearly exact, and what is compared is rounded to fp32: no rank decides differently because its
        processor adds in another order.
        """
        values = torch.stack([table[:, 0].double().mean(), table[:, 1].max().double()]).float()
        known = self._window.double()
        count = known[:, 0].isfinite().sum()
        mean = known.nanmean(0)
        deviation = (known - mean).square().nansum(0).div(count - 1).sqrt()
        limit = torch.where(count >= self._needed, mean + self._factor * deviation, torch.inf)
        limit = limit.float()
        finite = table.isfinite().all()
        is_spike = finite & (values > limit).any()
        moved = torch.cat([self._window[1:], values[None]])
        self._window = torch.where(finite & ~is_spike, moved, self._window)
        numbers = torch.stack([values, mean.float(), deviation.float(), limit])
        return Verdict(is_spike, numbers, self._factor)

    def recorded(self) -> list[list[float]]:
        """The window for the manifest. Waits for the device."""
        rows: list[list[float]] = self._window.tolist()
        return [row for row in rows if not math.isnan(row[0])]


def ended_by_spike(
    config: Config, what: str, *, step: int, lr: float, saved_step: int
) -> TrainingError:
    """The error that ends training. what: a sentence on the spike. The numbers: as for
    `diverged`."""
    skip = "train.spike=skip continues without their updates, and " * (config.train.spike == "stop")
    return TrainingError(
        f"step {step}: {what}",
        cause="a batch of unusual text, other data from here on (a stage of train.mix), or a learning"
        f" rate too high (train.lr is {config.train.lr:.2g}, this step's rate was {lr:.2g})",
        fix=f"{parent.fix_for_divergence(config, saved_step)}; where single batches are the cause,"
        f" {skip}a train.spike_factor above {config.train.spike_factor:g} accepts them",
    )
