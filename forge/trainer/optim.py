"""The optimizers of a run, its updates, clipped or left out, and the learning rate of every step."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from forge.core.optimizers import known
from forge.core.train_settings import Train
from forge.launch.torch_private import scales_gradients
from forge.trainer.models.decoder import Decoder

Optimizers = tuple[torch.optim.Optimizer, ...]


def make_optimizers(model: Decoder, train: Train) -> Optimizers:
    """The optimizer that train.optimizer names, and AdamW for the weights that this one leaves to it:
    each parameter has one of them. Weight decay is on matrices, not on norms and biases.

    All ranks call it, after the model is sharded: FSDP2 replaces the parameters.
    """
    weights: dict[str, list[torch.Tensor]] = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            weights.setdefault(_optimizer_of(model, name, weight, train), []).append(weight)
    return tuple(
        import_module(known()[kind].module or f"forge.trainer.optimizers.{kind}").make(
            _groups(its, train), train
        )
        for kind, its in weights.items()
    )


def _groups(weights: list[torch.Tensor], train: Train) -> list[dict[str, Any]]:
    groups = [
        {"params": [w for w in weights if w.dim() >= 2], "weight_decay": train.weight_decay},
        {"params": [w for w in weights if w.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _optimizer_of(model: Decoder, name: str, weight: torch.Tensor, train: Train) -> str:
    """The optimizer that updates this parameter."""
    if not known()[train.optimizer].of_blocks:
        return train.optimizer
    return train.optimizer if weight.dim() == 2 and model.is_in_block(name) else "adamw"


def state_shapes(
    model: Decoder, name: str, weight: torch.Tensor, train: Train
) -> dict[str, tuple[int, ...]]:
    """Shapes of the optimizer state of a parameter, all in fp32, by their names in a checkpoint."""
    kept = known()[_optimizer_of(model, name, weight, train)]
    scalars: dict[str, tuple[int, ...]] = dict.fromkeys(kept.scalars, ())
    return scalars | dict.fromkeys(kept.state, tuple(weight.shape))


def set_learning_rate(optimizers: Optimizers, lr: float) -> None:
    """Set the learning rate for the next update of all parameters."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr


def update(
    optimizers: Optimizers, grad_norm: torch.Tensor, *, largest: float, unless: torch.Tensor
) -> None:
    """Update weights and optimizer state, and drop the gradients. All ranks call it.

    grad_norm: of all gradients; the update is that of gradients scaled to a norm of at most `largest`, as
    by torch.nn.utils.clip_grad_norm_. unless: a boolean, equal on all ranks; where it is true, weights
    and state stay as they are. Both are scalars on the device of the weights. The host waits for the
    device only where an optimizer reads no grad_scale and found_inf, as torch.amp.GradScaler does.
    """
    scale = ((grad_norm + 1e-6) / largest).clamp(min=1)
    for optimizer in optimizers:
        if scales_gradients(optimizer):  # on the device: no pass over the gradients of its own
            optimizer.grad_scale, optimizer.found_inf = scale, unless.float()  # type: ignore[attr-defined]
            optimizer.step()
        elif not unless:
            _divide_gradients(optimizer, scale)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _divide_gradients(optimizer: torch.optim.Optimizer, scale: torch.Tensor) -> None:
    """Divide this rank's part of all gradients of an optimizer in place."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if (grad := weight.grad) is not None:
                (grad.to_local() if isinstance(grad, DTensor) else grad).div_(scale)


def learning_rate(step: int, train: Train, decay_steps: int) -> float:
    """Learning rate of a step (counted from 0): linear warm-up, then cosine decay or WSD.

    A pure function, so that a checkpoint needs no scheduler state. From `decay_steps` on the rate is
    at its minimum. Cosine: Loshchilov and Hutter 2017 (arXiv:1608.03983), without restarts. WSD: Hu
    et al. 2024 (arXiv:2404.06395).
    """
    if step >= decay_steps:
        return train.lr * train.min_lr_ratio
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps  # + 1: step 0 would change nothing
    start = train.decay_begin(decay_steps)
    done = max(0, step - start) / max(1, decay_steps - start)
    left = (1 + math.cos(math.pi * done)) / 2 if train.schedule == "cosine" else 1 - done
    return train.lr * (train.min_lr_ratio + (1 - train.min_lr_ratio) * left)
