"""Optimizer and schedule: AdamW with two parameter groups, and the learning rate of every step."""

from __future__ import annotations

import math

import torch
from torch import nn

from forge.core.config import Train


def make_optimizer(model: nn.Module, train: Train) -> torch.optim.AdamW:
    """Fused AdamW with weight decay on matrices, not on norms. TrainStep sets lr before each update.

    All ranks call it, after the model is sharded: FSDP2 replaces the parameters.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=train.lr, betas=(train.beta1, train.beta2), fused=True)


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
