"""The layers of Pythia, which is GPT-NeoX (Black et al. 2022, arXiv:2204.06745).

Parameters have the names of Hugging Face's GPT-NeoX. Shape suffixes: B batch, T tokens of a sample,
D model width, H heads, K head width.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge.trainer.documents import Documents, attend
from forge.trainer.models.decoder import Decoder
from forge.trainer.models.llama_decoder import rotary, rotate

from .hooks import Pythia


class PythiaAttention(nn.Module):
    """Causal self-attention, whose queries and keys are rotated in part; one product gives them, and the
    values, head by head."""

    def __init__(self, settings: Pythia) -> None:
        super().__init__()
        self.heads, self.rotary_dim = settings.heads, settings.rotary_dim
        self.query_key_value = nn.Linear(settings.dim, 3 * settings.dim)
        self.dense = nn.Linear(settings.dim, settings.dim)

    def forward(
        self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor, documents: Documents | None = None
    ) -> Tensor:
        of_heads = self.query_key_value(x_BTD).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        q_BHTK, k_BHTK, v_BHTK = of_heads.chunk(3, dim=-1)
        q_BHTK, k_BHTK = (self._turned(part, cos_TK, sin_TK) for part in (q_BHTK, k_BHTK))
        if documents is None:
            y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        else:
            y_BHTK = attend(q_BHTK, k_BHTK, v_BHTK, documents, grouped=False)
        return self.dense(y_BHTK.transpose(1, 2).flatten(-2))

    def _turned(self, x_BHTK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        turned, kept = x_BHTK[..., : self.rotary_dim], x_BHTK[..., self.rotary_dim :]
        return torch.cat((rotate(turned, cos_TK, sin_TK), kept), dim=-1)


class PythiaFeedForward(nn.Module):
    """Two products around GELU."""

    def __init__(self, settings: Pythia) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(settings.dim, settings.inner_dim)
        self.dense_4h_to_h = nn.Linear(settings.inner_dim, settings.dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(x_BTD)))


class PythiaBlock(nn.Module):
    """One decoder layer: the unit that FSDP2 shards."""

    def __init__(self, settings: Pythia) -> None:
        super().__init__()
        self.is_parallel = settings.parallel_residual
        self.input_layernorm = nn.LayerNorm(settings.dim, eps=settings.norm_eps)
        self.post_attention_layernorm = nn.LayerNorm(settings.dim, eps=settings.norm_eps)
        self.attention = PythiaAttention(settings)
        self.mlp = PythiaFeedForward(settings)
        self.dropout = nn.Dropout(settings.dropout)

    def forward(
        self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor, documents: Documents | None = None
    ) -> Tensor:
        attended_BTD = self.attention(self.input_layernorm(x_BTD), cos_TK, sin_TK, documents)
        after_BTD = x_BTD + self.dropout(attended_BTD)
        read_BTD = x_BTD if self.is_parallel else after_BTD
        return after_BTD + self.dropout(self.mlp(self.post_attention_layernorm(read_BTD)))


class PythiaTrunk(nn.Module):
    """Everything between token ids and the output layer. With documents, positions begin anew in each."""

    def __init__(self, settings: Pythia, rows: int) -> None:
        super().__init__()
        self.settings = settings
        self.embed_in = nn.Embedding(rows, settings.dim)
        self.dropout = nn.Dropout(settings.dropout)
        self.layers = nn.ModuleList(PythiaBlock(settings) for _ in range(settings.layers))
        self.final_layer_norm = nn.LayerNorm(settings.dim, eps=settings.norm_eps)

    def forward(self, tokens_BT: Tensor, documents: Documents | None = None) -> Tensor:
        x_BTD = self.dropout(self.embed_in(tokens_BT))
        settings = self.settings
        cos_TK, sin_TK = rotary(
            tokens_BT.shape[1], settings.rotary_dim, settings.rope_theta, x_BTD.device
        )
        if documents is not None:  # [B, 1, T, K]: the same for all heads
            cos_TK, sin_TK = (table[documents.positions][:, None] for table in (cos_TK, sin_TK))
        for block in self.layers:
            x_BTD = block(x_BTD, cos_TK, sin_TK, documents)
        return self.final_layer_norm(x_BTD)


class PythiaDecoder(Decoder):
    """A Pythia."""

    TRUNK: ClassVar[str] = "gpt_neox"
    EMBEDDING: ClassVar[str] = "embed_in"
    BLOCKS: ClassVar[str] = "layers"
    LAST_NORM: ClassVar[str] = "final_layer_norm"
    OUTPUT: ClassVar[str] = "embed_out"
    settings: Pythia

    def make_trunk(self, rows: int) -> PythiaTrunk:
        return PythiaTrunk(self.settings, rows)

    @property
    def narrow_width(self) -> int:
        """All products but the wide half of the feed-forward."""
        return 3 * self.settings.dim

    def adds_to_residual(self, name: str) -> bool:
        return name.endswith(("attention.dense.weight", "dense_4h_to_h.weight"))


DECODER = PythiaDecoder
