"""Section `model`: the shape of the decoder, and the pretrained weights that a run starts from."""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import Field, model_validator

from forge.core.section import FREE, FilePath, Section
from forge.core.values import shown

HUB_NAME = r"[\w.-]+/[\w.-]+@[\w./-]+"  # owner/name@revision


class RopeScaling(Section):
    """Longer rotary wavelengths, as Llama 3.1 and later have them (`rope_type` llama3)."""

    factor: float = Field(gt=0)
    """Wavelengths above original_tokens / low_freq_factor are longer by this factor."""
    low_freq_factor: float = Field(gt=0)
    """See factor."""
    high_freq_factor: float = Field(gt=0)
    """Wavelengths below original_tokens / high_freq_factor stay; those between change gradually."""
    original_tokens: int = Field(ge=1)
    """Length of the samples before the scaling (`original_max_position_embeddings`)."""

    @model_validator(mode="after")
    def _factors_are_ordered(self) -> Self:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor {self.low_freq_factor:g} must be smaller than high_freq_factor"
                f" {self.high_freq_factor:g}"
            )
        return self


class InitSettings(Section):
    """Pretrained weights that a run starts from: a repository of the hub, or a directory."""

    hub: str | None = None
    """`owner/name@revision`; downloaded on a login node."""
    path: FilePath | None = None
    """Directory with config.json, *.safetensors and, for its tokenizer, tokenizer.json."""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.hub is None) == (self.path is None):
            raise ValueError("init needs one of hub and path")
        if self.hub is not None and not re.fullmatch(HUB_NAME, self.hub):
            raise ValueError(f"hub is {shown(self.hub)}; it must look like owner/name@revision")
        return self

    @property
    def name(self) -> str:
        """The source in messages: `hub:owner/name@revision`, or the directory."""
        return f"hub:{self.hub}" if self.hub else str(self.path)


class Model(Section):
    """Shape of the Llama-style decoder."""

    dim: int = Field(256, ge=8)
    """Width of the residual stream."""
    layers: int = Field(4, ge=1)
    """Number of decoder blocks."""
    heads: int = Field(4, ge=1)
    """Query heads."""
    kv_heads: int | None = Field(None, ge=1)
    """Key and value heads (grouped-query attention); null means the same as heads."""
    head_dim: int | None = Field(None, ge=2)
    """Width of a head, an even number; null means dim / heads."""
    ffn_dim: int | None = Field(None, ge=8)
    """Hidden width of SwiGLU; null means 8/3 dim, rounded up to a multiple of 64."""
    rope_theta: float = Field(10000.0, gt=0)
    """Base of the rotary position frequencies."""
    rope_scaling: RopeScaling | None = None
    norm_eps: float = Field(1e-5, gt=0)
    """Epsilon of RMSNorm."""
    norm: Literal["pre", "post"] = "pre"
    """RMSNorm of what attention and feed-forward read (`pre`), or of what they give (`post`, OLMo 2)."""
    qk_norm: Literal["none", "head", "full"] = "none"
    """RMSNorm of queries and keys: of each `head` (Qwen3), or of all heads together (`full`, OLMo 2)."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout probability after attention and feed-forward, in training only."""
    tie_embeddings: bool = True
    """Share one matrix between input and output embeddings."""
    vocab_size: int | None = Field(None, ge=1, le=2**24)
    """Rows of the embedding, at least as many as the tokenizer has ids; null: as many."""
    init: InitSettings | None = Field(None, json_schema_extra=FREE)

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.init and self.vocab_size is None:
            return self  # the shape is that of the weights, which data/model.py fills in
        if (self.head_dim is None and self.dim % self.heads) or self.head_width % 2:
            got = f"{self.dim} / {self.heads}" if self.head_dim is None else self.head_dim
            raise ValueError(f"dim / heads, or head_dim, must be an even integer, got {got}")
        if self.heads % self.num_kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        return self

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.dim // self.heads

    @property
    def query_dim(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_width

    @property
    def kv_dim(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.num_kv_heads * self.head_width

    @property
    def inner_dim(self) -> int:
        return self.ffn_dim or -(-(8 * self.dim // 3) // 64) * 64

    def num_rows(self, num_ids: int) -> int:
        """Rows of the embedding for a tokenizer with so many ids."""
        return self.vocab_size or num_ids

    def num_parameters(self, num_ids: int) -> int:
        """Number of weights of the decoder; a tied matrix counts once. num_ids: of the tokenizer."""
        attention = 2 * self.dim * (self.query_dim + self.kv_dim)
        feed_forward = 3 * self.dim * self.inner_dim
        of_queries = {
            "none": 0,
            "head": 2 * self.head_width,
            "full": self.query_dim + self.kv_dim,
        }
        norms = 2 * self.dim + of_queries[self.qk_norm]
        embeddings = (1 if self.tie_embeddings else 2) * self.num_rows(num_ids) * self.dim
        return self.layers * (attention + feed_forward + norms) + self.dim + embeddings

    def flops_per_token(self, num_ids: int, seq_len: int) -> float:
        """FLOPs of forward and backward per trained token: 6 N + 12 L H K T.

        PaLM (arXiv:2204.02311), appendix B. N does not count an untied input embedding, which is a
        lookup. As in the paper, attention counts as if it were not causal.
        """
        looked_up = 0 if self.tie_embeddings else self.num_rows(num_ids) * self.dim
        attention = 12 * self.layers * self.query_dim * seq_len
        return 6 * (self.num_parameters(num_ids) - looked_up) + attention
