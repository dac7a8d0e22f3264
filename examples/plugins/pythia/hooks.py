"""Pythia, which is GPT-NeoX (Black et al. 2022, arXiv:2204.06745): keys, counts, and its form in
transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from forge.core.hooks import hook
from forge.core.models.base import INIT_STD, Activations, Model, not_given, not_neutral
from forge.core.values import shown

# Each number: key in config.json -> key of `model`.
NEOX_NUMBERS = {
    "hidden_size": "dim",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "intermediate_size": "ffn_dim",
    "vocab_size": "vocab_size",
    "layer_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
    "use_parallel_residual": "parallel_residual",
}
# What a config.json may leave out.
NEOX_DEFAULTS = {
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "use_parallel_residual": True,
}
# Keys that would change the forward pass, with the values that do not.
NEOX_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt_neox",),
    "hidden_act": ("gelu",),
    "attention_bias": (True,),
    "head_dim": (None,),  # read by transformers, though its class has no such key
}
THETA, SHARE = 10000.0, 0.25  # of transformers, where a config.json names none


class Pythia(Model):
    """LayerNorm, rotary positions of a part of each head, GELU; biases in all blocks."""

    HF_ARCHITECTURES: ClassVar[tuple[str, ...]] = ("GPTNeoXForCausalLM",)
    LAYERS: ClassVar[str] = f"{__package__}.layers"

    architecture: Literal["pythia"]
    tie_embeddings: bool = False
    """Share one matrix between input and output embeddings."""
    ffn_dim: int | None = Field(None, ge=8)
    """Hidden width of the feed-forward; null means 4 dim."""
    rope_theta: float = Field(THETA, gt=0)
    """Base of the rotary position frequencies."""
    rotary_share: float = Field(SHARE, gt=0, le=1)
    """Fraction of a head's width that is rotated."""
    parallel_residual: bool = True
    """Attention and feed-forward read the same residual stream, in place of one after the other."""
    norm_eps: float = Field(1e-5, gt=0)
    """Epsilon of LayerNorm."""

    @model_validator(mode="after")
    def _heads_divide_the_width(self) -> Self:
        if self.waits_for_shape:
            return self
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} is not a multiple of heads {self.heads}")
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(
                f"{self.rotary_dim} of the {self.head_width} numbers of a head are rotated"
                " (rotary_share), which must be an even number of them"
            )
        return self

    @property
    def inner_dim(self) -> int:
        return self.ffn_dim or 4 * self.dim

    @property
    def rotary_dim(self) -> int:
        """Numbers of a head that are rotated."""
        return int(self.head_width * self.rotary_share)

    # --- counts ---

    @property
    def block_parameters(self) -> int:
        matrices = 4 * self.dim**2 + 2 * self.dim * self.inner_dim
        biases = 5 * self.dim + self.inner_dim
        return matrices + biases + 4 * self.dim  # two norms

    def outer_parameters(self, num_rows: int) -> int:
        bias_of_norm = self.dim
        return super().outer_parameters(num_rows) + bias_of_norm

    def activations(self, size: int) -> Activations:
        width, wide = self.dim, self.inner_dim
        statistics = 4 * self.heads + 16  # of attention and norms, in fp32
        # The input of both norms, and of attention and feed-forward; queries, keys, values and
        # attention's output; and of the feed-forward, what goes into GELU and what comes out.
        one_input = 7 if self.parallel_residual else 8
        whole = one_input * width + 2 * wide
        # The input of the block, and what three products and attention give; of the fourth where it is as
        # narrow as queries, keys and values together.
        narrow = 7 * width + (wide if wide <= 3 * width else 0)
        return Activations(size * whole + statistics, size * narrow + statistics)

    # --- as transformers has it ---

    @classmethod
    def hf_misfits(cls, values: dict[str, Any], seq_len: int) -> Iterator[str]:
        values = {**NEOX_DEFAULTS, **values}
        yield from not_given(values, NEOX_NUMBERS, may_be_null=set())
        yield from not_neutral(values, NEOX_NEUTRAL)
        rope = _rope(values)
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            yield f"rope_type is {shown(kind)}"
        for key in ("rope_theta", "partial_rotary_factor"):
            if not isinstance(rope[key], int | float):
                yield f"{key} is {shown(rope[key])}"

    @classmethod
    def keys_of_hf(cls, values: dict[str, Any]) -> dict[str, Any]:
        values = {**NEOX_DEFAULTS, **values}
        rope = _rope(values)
        keys = {ours: values[theirs] for theirs, ours in NEOX_NUMBERS.items()}
        turned = {"rope_theta": rope["rope_theta"], "rotary_share": rope["partial_rotary_factor"]}
        return keys | turned

    def to_hf(self, seq_len: int) -> dict[str, Any]:
        return {
            "model_type": "gpt_neox",
            "hidden_size": self.dim,
            "intermediate_size": self.inner_dim,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "hidden_act": "gelu",
            "max_position_embeddings": seq_len,
            "initializer_range": INIT_STD,
            "layer_norm_eps": self.norm_eps,
            "use_parallel_residual": self.parallel_residual,
            "attention_bias": True,
            **dict.fromkeys(("attention_dropout", "hidden_dropout"), 0.0),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                "partial_rotary_factor": self.rotary_share,
            },
            "rotary_emb_base": self.rope_theta,  # these two for transformers 4
            "rotary_pct": self.rotary_share,
        }

    def hf_tensor(self, name: str) -> str | None:
        # Buffers that early versions of transformers stored.
        stored = (".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
        return None if name.endswith(stored) else name


def _rope(values: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings as transformers 5 resolves them: `GPTNeoXConfig.convert_rope_params_to_dict`."""
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    own = {
        "rope_theta": values.get("rotary_emb_base", THETA),
        "partial_rotary_factor": values.get("rotary_pct", SHARE),
    }
    return {**own, **rope} if isinstance(rope, dict) else {**own, "rope_type": rope}


@hook
def architectures() -> dict[str, type[Model]]:
    return {"pythia": Pythia}
