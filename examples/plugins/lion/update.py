"""Lion (Chen et al. 2023, arXiv:2302.06675): the sign of an interpolated momentum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from forge.core.train_settings import Train


def make(groups: list[dict[str, Any]], train: Train) -> torch.optim.Optimizer:
    """Lion for all weights."""
    return Lion(groups, lr=train.lr, betas=(train.beta1, train.beta2))


class Lion(torch.optim.Optimizer):
    """Each number moves by lr, in the direction of the sign of a mean of momentum and gradient; decoupled
    weight decay. The state of a weight is `exp_avg`.

    grad_scale, found_inf: as fused AdamW has them.
    """

    _step_supports_amp_scaling = True
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(
        self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float]
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update all weights that have gradients."""
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            for weight in weights:
                if not self.state[weight]:
                    self.state[weight]["exp_avg"] = torch.zeros_like(weight)
            self._update(
                [_local(weight) for weight in weights],
                [_local(weight.grad) for weight in weights],
                [_local(self.state[weight]["exp_avg"]) for weight in weights],
                group,
            )

    def _update(
        self,
        weights: list[Tensor],
        grads: list[Tensor],
        moments: list[Tensor],
        group: dict[str, Any],
    ) -> None:
        if not weights:
            return
        if self.grad_scale is not None:
            grads = list(torch._foreach_div(grads, self.grad_scale))
        beta1, beta2 = group["betas"]
        directions = torch._foreach_sign(torch._foreach_lerp(moments, grads, 1 - beta1))
        moved = torch._foreach_mul(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(moved, directions, alpha=-group["lr"])
        self._assign(weights, moved)
        self._assign(moments, torch._foreach_lerp(moments, grads, 1 - beta2))

    def _assign(self, old: list[Tensor], new: Any) -> None:
        """Replace the values of tensors, unless `found_inf` says that the update is left out."""
        if self.found_inf is not None:
            is_bad = self.found_inf > 0
            new = [
                torch.where(is_bad, before, after) for before, after in zip(old, new, strict=True)
            ]
        torch._foreach_copy_(old, list(new))


def _local(tensor: Tensor) -> Tensor:
    """This rank's rows."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
