"""Section `ladder`: a row's place in a ladder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from forge.core.section import Section

if TYPE_CHECKING:
    from forge.core.config import Config

MIN_SIZES, MIN_BUDGETS = 4, 3  # of each size
MIN_TRUNKS = 6  # one more than the fitted constants, of which ladder.floor fixes one


class Ladder(Section):
    """Small runs that forecast the loss of a larger one; `forge ladder --forecast 10` writes rows."""

    BOUND = ()
    IS_OF_TRAINER = True

    role: Literal["trunk", "rung", "forecast"] | None = None
    """`trunk`: keeps the checkpoints that rungs start from. `rung`: a point of the fit. `forecast`: a
    larger run, which is trained only after its loss was forecast. null: none of these."""
    floor: float | None = Field(None, gt=0)
    """Bits per byte that no model falls below (E of the fit); null: fitted, too."""


def parameters_of(config: Config) -> int:
    """N: weights of the blocks, without embeddings, output layer and last norm."""
    return config.model.layers * config.model.block_parameters


def tokens_per_step(config: Config) -> int:
    """Tokens that all ranks read in a step."""
    return config.train.batch_size * config.train.seq_len
