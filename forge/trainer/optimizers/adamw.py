"""AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), as torch has it."""

from __future__ import annotations

from typing import Any

import torch

from forge.core.train_settings import Train


def make(groups: list[dict[str, Any]], train: Train) -> torch.optim.Optimizer:
    """AdamW by torch's fused kernel, which also clips and skips."""
    return torch.optim.AdamW(groups, lr=train.lr, betas=(train.beta1, train.beta2), fused=True)
