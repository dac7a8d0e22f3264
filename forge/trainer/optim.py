"""Optimizers and schedule: AdamW, with Muon for the matrices of blocks or alone, and the learning rate
of every step."""

from __future__ import annotations

import math

import torch
from torch.distributed.tensor import DTensor

from forge.core.train_settings import Train
from forge.launch.torch_private import scales_gradients
from forge.trainer.models.decoder import Decoder
from forge.trainer.muon import Muon

Optimizers = tuple[torch.optim.Optimizer, ...]


def make_optimizers(model: Decoder, train: Train) -> Optimizers:
    """Fused AdamW, and Muon if train.optimizer says so; each parameter has one of them. Weight decay is
    on matrices, not on norms and biases.

    Muon's updates are scaled to the size of AdamW's, so that both take the same learning rate and weight
    decay. All ranks call it, after the model is sharded: FSDP2 replaces the parameters.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    of_muon = [p for name, p in named if _is_muons(model, name, p, train)]
    others = [p for name, p in named if not _is_muons(model, name, p, train)]
    groups = [
        {"params": [p for p in others if p.dim() >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=train.lr, betas=(train.beta1, train.beta2), fused=True)
    if not of_muon:
        return (adamw,)
    muon = Muon(of_muon, lr=train.lr, weight_decay=train.weight_decay, momentum=train.muon_momentum)
    return adamw, muon


def _is_muons(model: Decoder, name: str, weight: torch.Tensor, train: Train) -> bool:
    """Whether Muon updates this parameter: a matrix of a block."""
    return train.optimizer == "muon" and weight.dim() == 2 and model.is_in_block(name)


def state_shapes(
    model: Decoder, name: str, weight: torch.Tensor, train: Train
) -> dict[str, tuple[int, ...]]:
    """Shapes of the optimizer state of a parameter, all in fp32, by their names in a checkpoint."""
    shape = tuple(weight.shape)
    if _is_muons(model, name, weight, train):
        return {"momentum_buffer": shape}
    return {"step": (), "exp_avg": shape, "exp_avg_sq": shape}


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
    start = train.warmup_steps
    if train.schedule == "wsd":
        start = max(start, round(decay_steps * (1 - train.wsd_decay_fraction)))
    done = max(0, step - start) / max(1, decay_steps - start)
    left = (1 + math.cos(math.pi * done)) / 2 if train.schedule == "cosine" else 1 - done
    return train.lr * (train.min_lr_ratio + (1 - train.min_lr_ratio) * left)
