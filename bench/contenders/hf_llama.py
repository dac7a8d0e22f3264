"""A training step of transformers' Llama, as in a script for one GPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.contenders.nanogpt import make_optimizer
from bench.contenders.sizes import TRAIN, Sizes, Step, fill
from forge.launch.process_group import World

FEATURES = (
    "LlamaForCausalLM, each layer compiled (the model as a whole takes the compiler minutes), output"
    " layer and cross entropy compiled, logits in full, autocast to bf16, SDPA, fused AdamW, gradient"
    " checkpointing of whole layers where torchtitan-like has any, the loss not read"
)


def make_model(sizes: Sizes, device: torch.device) -> Any:
    """The model with the shapes of Forge's; ImportError without transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = sizes.model
    config = LlamaConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=shape.dim,
        intermediate_size=shape.inner_dim,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=sizes.seq_len,
        rms_norm_eps=shape.norm_eps,
        tie_word_embeddings=shape.tie_embeddings,
        attn_implementation="sdpa",
        use_cache=False,
    )
    with device:
        return LlamaForCausalLM(config)


def llama_step(sizes: Sizes, world: World) -> Step:
    """The step of one GPU."""
    train, device = TRAIN, world.device
    model = make_model(sizes, device)
    fill(model)
    model.train()
    if sizes.others_recompute != "none":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers:
        layer.compile()
    optimizer = make_optimizer(model, train, fused=True)
    batch = sizes.batch(device)

    @torch.compile
    def loss_of(hidden: Tensor, targets: Tensor) -> Tensor:
        logits = model.lm_head(hidden)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def take() -> Tensor:
        tokens, targets = (part.to(device, non_blocking=True) for part in batch)
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(model.model(input_ids=tokens).last_hidden_state, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Step(model, optimizer, take)
