"""The layers of Llama, Mistral, Qwen3 and OLMo 2.

Parameters have the names and the rotary convention of Hugging Face's, so that an export is a copy. Shape
suffixes: B batch, T tokens of a sample, D model width, H heads, K head width.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge.core.models.llama import Llama, RopeScaling
from forge.trainer.documents import Documents, attend
from forge.trainer.models.decoder import Decoder


class OutputNorm(nn.RMSNorm):
    """RMSNorm of what a matrix product gives: under autocast bf16, beside weights of norms in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class Attention(nn.Module):
    """Causal self-attention with rotary positions and, optionally, grouped key and value heads."""

    def __init__(self, settings: Llama) -> None:
        super().__init__()
        self.head_dim = settings.head_width
        self.grouped = settings.num_kv_heads != settings.heads
        self.qk_norm = settings.qk_norm
        query_dim, kv_dim = settings.query_dim, settings.kv_dim
        self.q_proj = nn.Linear(settings.dim, query_dim, bias=False)
        self.k_proj = nn.Linear(settings.dim, kv_dim, bias=False)
        self.v_proj = nn.Linear(settings.dim, kv_dim, bias=False)
        self.o_proj = nn.Linear(query_dim, settings.dim, bias=False)
        if self.qk_norm != "none":
            is_full = self.qk_norm == "full"
            eps = settings.norm_eps
            self.q_norm = OutputNorm(query_dim if is_full else self.head_dim, eps=eps)
            self.k_norm = OutputNorm(kv_dim if is_full else self.head_dim, eps=eps)

    def forward(
        self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor, documents: Documents | None = None
    ) -> Tensor:
        q, k, v = self.q_proj(x_BTD), self.k_proj(x_BTD), self.v_proj(x_BTD)
        if self.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in (q, k, v))
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        q_BHTK, k_BHTK, v_BHTK = (part.transpose(1, 2) for part in (q, k, v))
        q_BHTK, k_BHTK = rotate(q_BHTK, cos_TK, sin_TK), rotate(k_BHTK, cos_TK, sin_TK)
        if documents is None:
            y_BHTK = F.scaled_dot_product_attention(
                q_BHTK, k_BHTK, v_BHTK, is_causal=True, enable_gqa=self.grouped
            )
        else:
            y_BHTK = attend(q_BHTK, k_BHTK, v_BHTK, documents, grouped=self.grouped)
        return self.o_proj(y_BHTK.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, settings: Llama) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(settings.dim, settings.inner_dim, bias=False)
        self.up_proj = nn.Linear(settings.dim, settings.inner_dim, bias=False)
        self.down_proj = nn.Linear(settings.inner_dim, settings.dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class Block(nn.Module):
    """One decoder layer: the unit that FSDP2 shards.

    `post_attention_layernorm` is where Hugging Face has it: with pre-norm before the feed-forward, with
    post-norm before the sum.
    """

    def __init__(self, settings: Llama) -> None:
        super().__init__()
        self.is_post_norm = settings.norm == "post"
        if not self.is_post_norm:
            self.input_layernorm = nn.RMSNorm(settings.dim, eps=settings.norm_eps)
        self.self_attn = Attention(settings)
        of_output = OutputNorm if self.is_post_norm else nn.RMSNorm
        self.post_attention_layernorm = of_output(settings.dim, eps=settings.norm_eps)
        self.mlp = FeedForward(settings)
        if self.is_post_norm:
            self.post_feedforward_layernorm = OutputNorm(settings.dim, eps=settings.norm_eps)
        self.dropout = nn.Dropout(settings.dropout)

    def forward(
        self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor, documents: Documents | None = None
    ) -> Tensor:
        if self.is_post_norm:
            attended_BTD = self.self_attn(x_BTD, cos_TK, sin_TK, documents)
            x_BTD = x_BTD + self.dropout(self.post_attention_layernorm(attended_BTD))
            return x_BTD + self.dropout(self.post_feedforward_layernorm(self.mlp(x_BTD)))
        attended_BTD = self.self_attn(self.input_layernorm(x_BTD), cos_TK, sin_TK, documents)
        x_BTD = x_BTD + self.dropout(attended_BTD)
        return x_BTD + self.dropout(self.mlp(self.post_attention_layernorm(x_BTD)))


class Trunk(nn.Module):
    """Everything between token ids and the output layer."""

    def __init__(self, settings: Llama, rows: int) -> None:
        super().__init__()
        self.settings = settings
        self.embed_tokens = nn.Embedding(rows, settings.dim)
        self.layers = nn.ModuleList(Block(settings) for _ in range(settings.layers))
        self.norm = nn.RMSNorm(settings.dim, eps=settings.norm_eps)

    def forward(self, tokens_BT: Tensor, documents: Documents | None = None) -> Tensor:
        x_BTD = self.embed_tokens(tokens_BT)
        settings = self.settings
        cos_TK, sin_TK = rotary(
            tokens_BT.shape[1],
            settings.head_width,
            settings.rope_theta,
            x_BTD.device,
            settings.rope_scaling,
        )
        if documents is not None:  # [B, 1, T, K]: the same for all heads
            cos_TK, sin_TK = (table[documents.positions][:, None] for table in (cos_TK, sin_TK))
        for block in self.layers:
            x_BTD = block(x_BTD, cos_TK, sin_TK, documents)
        return self.norm(x_BTD)


class LlamaDecoder(Decoder):
    """A Llama, Mistral, Qwen3 or OLMo 2."""

    TRUNK: ClassVar[str] = "model"
    EMBEDDING: ClassVar[str] = "embed_tokens"
    BLOCKS: ClassVar[str] = "layers"
    LAST_NORM: ClassVar[str] = "norm"
    settings: Llama

    def make_trunk(self, rows: int) -> Trunk:
        return Trunk(self.settings, rows)

    @property
    def narrow_width(self) -> int:
        """All products but the wide half of the feed-forward."""
        return max(self.settings.dim, self.settings.query_dim)

    def adds_to_residual(self, name: str) -> bool:
        return name.endswith(("o_proj.weight", "down_proj.weight"))


DECODER = LlamaDecoder


# --- rotary positions ---------------------------------------------------------------------------


def rotary(
    num_tokens: int, head_dim: int, theta: float, device: Any, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """cos_TK and sin_TK of RoPE (Su et al. 2021, arXiv:2104.09864), in fp32.

    Computed in each forward pass: takes microseconds, and leaves no buffer to move, cast or store.
    """
    powers = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    frequencies = theta**-powers
    if scaling:
        frequencies = scaled(frequencies, scaling)
    positions_T = torch.arange(num_tokens, device=device, dtype=torch.float32)
    angles_TK = torch.outer(positions_T, frequencies).repeat(1, 2)
    return angles_TK.cos(), angles_TK.sin()


def scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Rotary frequencies of Llama 3.1: the high ones stay, the low ones are divided by the factor, those
    between by less. As `_compute_llama3_parameters` of transformers (modeling_rope_utils.py)."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    periods = scaling.original_tokens * frequencies / (2 * math.pi)  # in the original samples
    kept = ((periods - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def rotate(x_BHTK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Rotate each pair (k, k + K/2) by its position: the "rotate half" convention of Hugging Face.

    In the type of x, as transformers. What fp32 would cost and give in bf16:
    docs/measured/reproducibility.md.
    """
    left, right = x_BHTK.chunk(2, dim=-1)
    turned_BHTK = torch.cat((-right, left), dim=-1)
    return x_BHTK * cos_TK.to(x_BHTK.dtype) + turned_BHTK * sin_TK.to(x_BHTK.dtype)
