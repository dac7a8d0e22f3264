"""A training step like torchtitan's: its Llama 3, its way to shard, compile and recompute, its loss.

Written after pytorch/torchtitan at b5bcd76 (August 2026): models/llama3, models/common,
distributed/fsdp.py, distributed/activation_checkpoint.py, components/loss.py, trainer.py. Shape
suffixes: B samples, T tokens, D model width, H heads, K head width, N tokens of all samples, V
vocabulary.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from bench.contenders.sizes import TRAIN, Sizes, Step, fill
from forge.core.models.llama import Llama as Shape
from forge.core.train_settings import Recompute
from forge.launch.process_group import World

FEATURES = (
    "each block compiled (fullgraph), fully_shard in bf16 with fp32 reduction (on one GPU, too), loss in"
    " 8 chunks with compiled cross entropy, fused AdamW, one product for queries, keys and values,"
    " complex RoPE, SDPA with cuDNN first, Python's garbage collector off, activation checkpointing as"
    " its Llama 3 configs (8B: selective, 70B: full; none where it has no config and memory is left), the"
    " loss not read. Not: FlexAttention, which it needs for packed documents; CUDA graphs"
)
NUM_CHUNKS = 8  # of the loss
ATTENTION = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)


# --- the model ----------------------------------------------------------------------------------


class Attention(nn.Module):
    """Grouped-query attention; one product gives queries, keys and values."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim, self.kv_heads = shape.dim // shape.heads, shape.num_kv_heads
        self.group = shape.heads // shape.num_kv_heads
        width = self.kv_heads * (self.group + 2) * self.head_dim
        self.wqkv = nn.Linear(shape.dim, width, bias=False)
        self.wo = nn.Linear(shape.dim, shape.dim, bias=False)

    def forward(self, x_BTD: Tensor, turns_TK: Tensor) -> Tensor:
        qkv = self.wqkv(x_BTD).unflatten(-1, (self.kv_heads, self.group + 2, self.head_dim))
        q_BTHK, k_BTHK, v_BTHK = (
            part.flatten(2, 3) for part in qkv.split([self.group, 1, 1], dim=-2)
        )
        q_BTHK, k_BTHK = turn(q_BTHK, turns_TK), turn(k_BTHK, turns_TK)
        with sdpa_kernel(list(ATTENTION), set_priority=True):
            y_BHTK = F.scaled_dot_product_attention(
                *(part.transpose(1, 2) for part in (q_BTHK, k_BTHK, v_BTHK)),
                is_causal=True,
                enable_gqa=self.group > 1,
            )
        return self.wo(y_BHTK.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """RMSNorm before attention and before SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.attention = Attention(shape)
        self.ffn_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.w1, self.w3 = (nn.Linear(shape.dim, shape.inner_dim, bias=False) for _ in range(2))
        self.w2 = nn.Linear(shape.inner_dim, shape.dim, bias=False)

    def forward(self, x_BTD: Tensor, turns_TK: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), turns_TK)
        y_BTD = self.ffn_norm(x_BTD)
        return x_BTD + self.w2(F.silu(self.w1(y_BTD)) * self.w3(y_BTD))


class Llama(nn.Module):
    """All but the output layer, which the loss calls for each chunk."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        shape = sizes.model
        self.tok_embeddings = nn.Embedding(sizes.vocab_size, shape.dim)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.lm_head = nn.Linear(shape.dim, sizes.vocab_size, bias=False)
        if shape.tie_embeddings:
            self.tok_embeddings.weight = self.lm_head.weight

    def forward(self, tokens_BT: Tensor, turns_TK: Tensor) -> Tensor:
        x_BTD = self.tok_embeddings(tokens_BT)
        for block in self.layers:
            x_BTD = block(x_BTD, turns_TK)
        return self.norm(x_BTD)


def turns(sizes: Sizes, device: torch.device) -> Tensor:
    """exp(i angle) of each position and pair of a head's numbers, complex64 [T, K / 2]."""
    head_dim = sizes.model.dim // sizes.model.heads
    powers = torch.arange(0, head_dim, 2, device=device).float() / head_dim
    positions = torch.arange(sizes.seq_len, device=device).float()
    angles = torch.outer(positions, sizes.model.rope_theta**-powers)
    return torch.polar(torch.ones_like(angles), angles)


def turn(x_BTHK: Tensor, turns_TK: Tensor) -> Tensor:
    """Rotary positions of neighboring numbers, as complex products in fp32."""
    pairs = torch.view_as_complex(x_BTHK.float().unflatten(-1, (-1, 2)))
    turned = torch.view_as_real(pairs * turns_TK[:, None])
    return turned.flatten(-2).to(x_BTHK.dtype)


# --- recomputation, compilation, sharding -------------------------------------------------------


def keep(
    counts: dict[bool, int], context: Any, operator: Any, *_: Any, **__: Any
) -> CheckpointPolicy:
    """Keeps attention's output and every second matrix product of a block."""
    if operator == torch.ops.aten.mm.default:
        counts[context.is_recompute] += 1
        kept = counts[context.is_recompute] % 2 == 1
    else:
        kept = "scaled_dot_product" in str(operator)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def selective() -> Any:
    """Contexts of one forward pass and its recomputation."""
    return create_selective_checkpoint_contexts(partial(keep, {False: 0, True: 0}))


def recompute(model: Llama, how: Recompute) -> None:
    """Activation checkpointing of each block."""
    options: dict[str, Any] = {"context_fn": selective} if how == "selective" else {}
    for number, block in enumerate(model.layers if how != "none" else ()):
        model.layers[number] = checkpoint_wrapper(block, early_stop=False, **options)


def shard(model: Llama, world: World) -> None:
    """FSDP2 over all ranks: each block, the embedding and the output layer are units."""
    mesh = init_device_mesh(world.device.type, (world.rank.world_size,))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    if model.lm_head.weight is not model.tok_embeddings.weight:  # else they belong to the root
        fully_shard(model.tok_embeddings, **options)
        fully_shard(model.lm_head, **options, reshard_after_forward=False)
    for block in model.layers:
        fully_shard(block, **options)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # the loss is divided by the tokens of all ranks


# --- the step -----------------------------------------------------------------------------------


def chunk_loss(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """Sum over the tokens of a chunk."""
    return F.cross_entropy(logits_NV.float(), targets_N, reduction="sum")


def backward_of_loss(
    head: Any, hidden_ND: Tensor, targets_N: Tensor, num_tokens: int, loss_fn: Callable[..., Tensor]
) -> Tensor:
    """Backward pass of the loss, chunk by chunk, then of the model; the sum over tokens / num_tokens.

    The weight of the output layer stays gathered, and its gradient is reduced once, with the last chunk.
    """
    is_unit = isinstance(head, FSDPModule)
    if is_unit:
        head.set_requires_gradient_sync(False)
        head.set_reshard_after_backward(False)
        head.unshard()
    gradient_ND = torch.zeros_like(hidden_ND, dtype=torch.float32)
    total = gradient_ND.new_zeros(())
    parts = zip(
        *(x.chunk(NUM_CHUNKS) for x in (hidden_ND.detach(), targets_N, gradient_ND)), strict=True
    )
    for number, (hidden, targets, gradient) in enumerate(parts):
        if is_unit and number == NUM_CHUNKS - 1:
            head.set_requires_gradient_sync(True)
        hidden.requires_grad_()
        loss = loss_fn(head(hidden), targets) / num_tokens
        loss.backward()
        gradient.copy_(hidden.grad)
        total += loss.detach()
    if is_unit:
        head.set_reshard_after_backward(True)
        head.reshard()
    hidden_ND.backward(gradient_ND.to(hidden_ND.dtype))
    return total


@contextmanager
def no_collection() -> Iterator[None]:
    """Without Python's garbage collector, which torchtitan runs every 50 steps."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def titan_step(sizes: Sizes, world: World) -> Step:
    """The step of one rank, whose model is sharded over all ranks, even over a single one."""
    train, device = TRAIN, world.device
    with torch.device("meta"):
        model = Llama(sizes)
    recompute(model, sizes.others_recompute)
    for block in model.layers:
        block.compile(fullgraph=True)
    shard(model, world)
    model.to_empty(device=device)
    fill(model)
    turns_TK = turns(sizes, device)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=train.lr,
        betas=(train.beta1, train.beta2),
        weight_decay=train.weight_decay,
        fused=True,
    )
    loss_fn = torch.compile(chunk_loss)
    batch = sizes.batch(device)
    num_tokens = sizes.tokens * sizes.ranks

    def take() -> Tensor:
        with no_collection():
            optimizer.zero_grad(set_to_none=True)
            tokens, targets = (part.to(device, non_blocking=True) for part in batch)
            hidden_ND = model(tokens, turns_TK).flatten(0, 1)
            loss = backward_of_loss(
                model.lm_head, hidden_ND, targets.flatten(), num_tokens, loss_fn
            )
            norm: Any = torch.nn.utils.get_total_norm(
                [p.grad for p in model.parameters() if p.grad is not None], foreach=True
            )
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            torch.nn.utils.clip_grads_with_norm_(
                model.parameters(), train.grad_clip, norm, foreach=True
            )
            optimizer.step()
        return torch.where(torch.isfinite(norm), loss * sizes.ranks, norm)  # it asserts that

    return Step(model, optimizer, take)
