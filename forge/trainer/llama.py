"""The model: a compact Llama-style decoder, and sampling from it.

Parameters have the names and the rotary convention of Hugging Face's Llama, Qwen3 and OLMo 2, so that
an export is a copy. Shape suffixes: B batch, T tokens of a sample, D model width, H heads, K head
width, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge.core.errors import ConfigError
from forge.core.model_settings import Model, RopeScaling
from forge.trainer.documents import Documents, attend
from forge.trainer.loss import linear_cross_entropy


class OutputNorm(nn.RMSNorm):
    """RMSNorm of what a matrix product gives: under autocast bf16, beside weights of norms in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class Attention(nn.Module):
    """Causal self-attention with rotary positions and, optionally, grouped key and value heads."""

    def __init__(self, settings: Model) -> None:
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

    def __init__(self, settings: Model) -> None:
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

    def __init__(self, settings: Model) -> None:
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

    def __init__(self, settings: Model, num_ids: int) -> None:
        super().__init__()
        self.settings = settings
        self.embed_tokens = nn.Embedding(settings.num_rows(num_ids), settings.dim)
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


class OutputLayer(nn.Linear):
    """The output layer: from the last hidden states to logits, or straight to the loss."""

    def forward(
        self, x_BTD: Tensor, targets_BT: Tensor | None = None, compiled: bool = False
    ) -> Tensor:
        """As Decoder.forward; compiled: of linear_cross_entropy."""
        return _logits_or_loss(x_BTD, self.weight, targets_BT, compiled)


def _logits_or_loss(
    x_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor | None, compiled: bool
) -> Tensor:
    if targets_BT is None:
        return F.linear(x_BTD, weight_VD)
    hidden_ND, targets_N = x_BTD.flatten(0, 1), targets_BT.flatten()
    return linear_cross_entropy(hidden_ND, weight_VD, targets_N, compiled=compiled)


class Decoder(nn.Module):
    """The language model, without memory for its weights: `to_empty` gives it some, and
    initialize.initialize or a checkpoint the values.

    With tied embeddings there is no `lm_head`, so that a checkpoint has the matrix once. `forward` then
    reads the weight of the embedding without calling it: for FSDP2 it must belong to the Decoder.
    num_ids: of the tokenizer. compiles_loss: whether the loss of a training step goes through
    torch.compile.
    """

    def __init__(self, settings: Model, num_ids: int) -> None:
        super().__init__()
        self.settings = settings
        self.compiles_loss = False
        # On meta: a sharded model must never be on one device as a whole.
        with torch.device("meta"):
            self.model = Trunk(settings, num_ids)
            tied, rows = settings.tie_embeddings, settings.num_rows(num_ids)
            self.lm_head = None if tied else OutputLayer(settings.dim, rows, bias=False)

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Logits [B, T, V], or with targets their mean cross entropy, a scalar in fp32. documents: of the
        tokens, which attention then stays inside of; None: each window is one document."""
        x_BTD = self.model(tokens_BT, documents)
        if self.lm_head is None:
            weight_VD = self.model.embed_tokens.weight
            return _logits_or_loss(x_BTD, weight_VD, targets_BT, self.compiles_loss)
        return self.lm_head(x_BTD, targets_BT, self.compiles_loss)

    # --- what training and checkpoints ask of a model ---

    @property
    def blocks(self) -> nn.ModuleList:
        """The layers, all alike: each is compiled, recomputed and sharded by itself."""
        return self.model.layers

    @property
    def num_rows(self) -> int:
        """Rows of the embedding: the vocabulary and its padding."""
        return self.model.embed_tokens.num_embeddings

    @property
    def narrow_width(self) -> int:
        """Largest width of what selective recomputation keeps: all products but the wide half of the
        feed-forward."""
        return max(self.settings.dim, self.settings.query_dim)

    def ends(self) -> tuple[nn.Module, list[nn.Module]] | None:
        """The embedding, and all that follows the last block, each of which FSDP2 gathers by itself; None
        with tied embeddings, which both use."""
        if self.lm_head is None:
            return None
        return self.model.embed_tokens, [self.model.norm, self.lm_head]

    def is_in_block(self, name: str) -> bool:
        """Whether a parameter belongs to a block: Muon updates the matrices of these."""
        return name.startswith("model.layers.")

    def adds_to_residual(self, name: str) -> bool:
        """Whether what this matrix gives is added to the residual stream."""
        return name.endswith(("o_proj.weight", "down_proj.weight"))

    def num_parameters(self) -> int:
        """Number of weights; a tied matrix counts once."""
        return self.settings.num_parameters(self.num_rows)

    def flops_per_token(self, seq_len: int) -> float:
        """As Model.flops_per_token."""
        return self.settings.flops_per_token(self.num_rows, seq_len)


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
    """Rotate each pair (k, k + K/2) by its position: the "rotate half" convention of Hugging Face."""
    left, right = x_BHTK.chunk(2, dim=-1)
    turned_BHTK = torch.cat((-right, left), dim=-1)
    return x_BHTK * cos_TK.to(x_BHTK.dtype) + turned_BHTK * sin_TK.to(x_BHTK.dtype)


# --- sampling -----------------------------------------------------------------------------------


@torch.no_grad()
def sample(
    model: Decoder,
    prompt_ids: list[int],
    num_tokens: int,
    *,
    context: int,
    seed: int,
    temperature: float = 0.8,
    top_k: int = 50,
) -> list[int]:
    """`num_tokens` ids that continue the prompt; with temperature 0 the most likely ones.

    context: the model sees at most this many of the last tokens (train.seq_len: positions beyond it
    were never trained). There is no KV cache: each token costs a full forward pass, fast enough for
    the short samples of a report. Raises ConfigError on an empty prompt. Called on one rank with an
    unsharded model.
    """
    if not prompt_ids:
        raise ConfigError("the prompt has no tokens", fix="give at least one character to continue")
    was_training = model.training
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt_ids)
    device = model.model.embed_tokens.weight.device
    for _ in range(num_tokens):
        logits_V = model(torch.tensor([ids[-context:]], device=device))[0, -1].float().cpu()
        if temperature == 0:
            ids.append(int(logits_V.argmax()))
            continue
        top = logits_V.topk(min(top_k, len(logits_V)))
        choice = torch.multinomial((top.values / temperature).softmax(0), 1, generator=generator)
        ids.append(int(top.indices[choice]))
    model.train(was_training)
    return ids[len(prompt_ids) :]
