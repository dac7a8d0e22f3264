"""Activation checkpointing (train.recompute): blocks keep less for the backward pass and recompute it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from forge.core.train import Recompute
from forge.trainer.llama import Decoder


def apply(decoder: Decoder, how: Recompute) -> None:
    """Have the blocks of a decoder recompute their forward pass in the backward pass, with the same
    dropout masks and so the same gradients, bit by bit. Before the decoder is sharded or compiled.

    full: a block keeps its input only. selective: also the outputs of attention and of the matrix
    products that are as narrow as the model or its queries; those of the feed-forward's wide half, which
    are most of the memory, are computed again.
    """
    if how == "none":
        return
    options: dict[str, Any] = {}
    if how == "selective":
        narrow = max(decoder.settings.dim, decoder.settings.query_dim)
        policy = partial(_policy, narrow)
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    for block in decoder.model.layers:
        # The forward inside of the module, so that hooks of FSDP2 run once, around it.
        block.forward = partial(
            checkpoint,
            block.forward,
            use_reentrant=False,
            # A copy of the generator's state for each block, which only dropout needs.
            preserve_rng_state=decoder.settings.dropout > 0,
            **options,
        )


def _policy(narrow: int, _: Any, operator: Any, *args: Any, **__: Any) -> CheckpointPolicy:
    """Whether the output of an operator is kept."""
    is_attention = any(name in str(operator) for name in ("scaled_dot_product", "varlen_attn"))
    is_narrow = operator == torch.ops.aten.mm.default and args[1].shape[1] <= narrow
    keep = is_attention or is_narrow
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
