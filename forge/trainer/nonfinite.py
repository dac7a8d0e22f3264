"""Handling of a step whose loss or gradient norm is not finite, or a spike: end the run, or skip the
update.

All ranks decide the same, from gathered numbers and from counters in the checkpoint, so that a
resumed run decides as an uninterrupted one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from forge.checkpoint import parent
from forge.checkpoint.manifest import Manifest
from forge.core.config import Config
from forge.core.errors import TrainingError
from forge.core.train import Train


@dataclass
class Skipped:
    """Number of steps without an update: in the run, and in a row up to now."""

    steps: int = 0
    in_a_row: int = 0

    @classmethod
    def of(cls, manifest: Manifest) -> Skipped:
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
        if policy in ("stop", "rewind"):
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
