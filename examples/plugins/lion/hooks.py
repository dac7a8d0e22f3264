"""Lion (Chen et al. 2023, arXiv:2302.06675): what plans and checks of checkpoints know of it."""

from __future__ import annotations

from forge.core.hooks import hook
from forge.core.optimizers import Optimizer


@hook
def optimizers() -> dict[str, Optimizer]:
    return {"lion": Optimizer(state=("exp_avg",), module=f"{__package__}.update")}
