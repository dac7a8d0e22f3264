"""nanoGPT's model, and its training step on a GPU.

Written after karpathy/nanoGPT at 3adf61e: model.py, train.py, config/train_gpt2.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.contenders.sizes import TRAIN, Sizes, Step, fill
from forge.core.train_settings import Train
from forge.launch.process_group import World

FEATURES = (
    "GPT-2 (tied embeddings, learned positions, no bias), compiled as a whole, autocast to bf16, SDPA,"
    " logits in full, fused AdamW, the loss not read"
)


class GPTBlock(nn.Module):
    """nanoGPT's block with its defaults: no bias, no dropout, GELU, 4x feed-forward."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(dim, bias=False), nn.LayerNorm(dim, bias=False)
        self.c_attn = nn.Linear(dim, 3 * dim, bias=False)
        self.attn_proj = nn.Linear(dim, dim, bias=False)
        self.c_fc = nn.Linear(dim, 4 * dim, bias=False)
        self.mlp_proj = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.c_attn(self.ln_1(x)).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_proj(y.transpose(1, 2).contiguous().flatten(-2))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    """What nanoGPT trains: tied embeddings, learned positions."""

    def __init__(self, dim: int, layers: int, heads: int, seq_len: int, vocab_size: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, dim), nn.Embedding(seq_len, dim)
        self.h = nn.ModuleList(GPTBlock(dim, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(dim, bias=False)
        self.lm_head = nn.Linear(dim, vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def make_optimizer(model: nn.Module, train: Train, *, fused: bool) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices, not on vectors."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": train.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    betas = (train.beta1, train.beta2)
    return torch.optim.AdamW(groups, lr=train.lr, betas=betas, fused=fused)


def nanogpt_step(sizes: Sizes, world: World) -> Step:
    """The step of its train.py, with one micro-batch. Its parameters, without positions, are as many as
    those of a Llama with a feed-forward of 8/3 the width, so FLOPs are the same."""
    shape, train, device = sizes.model, TRAIN, world.device
    with device:
        model = GPT(shape.dim, shape.layers, shape.heads, sizes.seq_len, sizes.vocab_size)
    fill(model)
    optimizer = make_optimizer(model, train, fused=True)
    compiled = torch.compile(model)
    batch = sizes.batch(device)

    def take() -> Tensor:
        tokens, targets = (part.to(device, non_blocking=True) for part in batch)
        with torch.autocast(device.type, torch.bfloat16):
            loss = compiled(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Step(model, optimizer, take)
