"""The layers of GPT-2 (Radford et al. 2019).

Parameters have the names of Hugging Face's GPT-2. Its files have the matrices of the blocks transposed
(Conv1D); here they are those of nn.Linear. Shape suffixes: B batch, T tokens of a sample, D model width,
H heads, K head width.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge.core.models.gpt2 import Gpt2
from forge.trainer.documents import Documents, attend
from forge.trainer.models.decoder import Decoder


class Gpt2Attention(nn.Module):
    """Causal self-attention; queries, keys and values come from one product."""

    def __init__(self, settings: Gpt2) -> None:
        super().__init__()
        self.heads = settings.heads
        self.c_attn = nn.Linear(settings.dim, 3 * settings.dim)
        self.c_proj = nn.Linear(settings.dim, settings.dim)

    def forward(self, x_BTD: Tensor, documents: Documents | None = None) -> Tensor:
        q_BHTK, k_BHTK, v_BHTK = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.c_attn(x_BTD).chunk(3, dim=-1)
        )
        if documents is None:
            y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        else:
            y_BHTK = attend(q_BHTK, k_BHTK, v_BHTK, documents, grouped=False)
        return self.c_proj(y_BHTK.transpose(1, 2).flatten(-2))


class Gpt2FeedForward(nn.Module):
    """Two products around GELU, in its tanh form."""

    def __init__(self, settings: Gpt2) -> None:
        super().__init__()
        self.c_fc = nn.Linear(settings.dim, settings.inner_dim)
        self.c_proj = nn.Linear(settings.inner_dim, settings.dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x_BTD), approximate="tanh"))


class Gpt2Block(nn.Module):
    """One decoder layer: the unit that FSDP2 shards."""

    def __init__(self, settings: Gpt2) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(settings.dim, eps=settings.norm_eps)
        self.attn = Gpt2Attention(settings)
        self.ln_2 = nn.LayerNorm(settings.dim, eps=settings.norm_eps)
        self.mlp = Gpt2FeedForward(settings)
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, x_BTD: Tensor, documents: Documents | None = None) -> Tensor:
        x_BTD = x_BTD + self.dropout(self.attn(self.ln_1(x_BTD), documents))
        return x_BTD + self.dropout(self.mlp(self.ln_2(x_BTD)))


class Gpt2Trunk(nn.Module):
    """Everything between token ids and the output layer. With documents, positions begin anew in each."""

    def __init__(self, settings: Gpt2, rows: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(rows, settings.dim)
        self.wpe = nn.Embedding(settings.positions, settings.dim)
        self.dropout = nn.Dropout(settings.dropout)
        self.h = nn.ModuleList(Gpt2Block(settings) for _ in range(settings.layers))
        self.ln_f = nn.LayerNorm(settings.dim, eps=settings.norm_eps)

    def forward(self, tokens_BT: Tensor, documents: Documents | None = None) -> Tensor:
        if documents is None:
            positions = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        else:
            positions = documents.positions
        x_BTD = self.dropout(self.wte(tokens_BT) + self.wpe(positions))
        for block in self.h:
            x_BTD = block(x_BTD, documents)
        return self.ln_f(x_BTD)


class Gpt2Decoder(Decoder):
    """A GPT-2."""

    TRUNK: ClassVar[str] = "transformer"
    EMBEDDING: ClassVar[str] = "wte"
    BLOCKS: ClassVar[str] = "h"
    LAST_NORM: ClassVar[str] = "ln_f"
    settings: Gpt2

    def make_trunk(self, rows: int) -> Gpt2Trunk:
        return Gpt2Trunk(self.settings, rows)

    @property
    def narrow_width(self) -> int:
        """All products but the wide half of the feed-forward."""
        return 3 * self.settings.dim

    def adds_to_residual(self, name: str) -> bool:
        return name.endswith("c_proj.weight")


DECODER = Gpt2Decoder
