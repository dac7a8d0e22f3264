"""GPT-2 (Radford et al. 2019): keys, counts, and its form in transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from forge.core.models.base import INIT_STD, Activations, Model, not_given, not_neutral

# Each number: key in config.json -> key of `model`.
GPT2_NUMBERS = {
    "n_embd": "dim",
    "n_layer": "layers",
    "n_head": "heads",
    "n_inner": "ffn_dim",
    "n_positions": "positions",
    "vocab_size": "vocab_size",
    "layer_norm_epsilon": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
}
# What a config.json may leave out.
GPT2_DEFAULTS = {"n_inner": None, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}
# Second names of numbers (`GPT2Config.attribute_map`), which win where a config.json has both.
GPT2_ALIASES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
# Keys that would change the forward pass, with the values that do not.
GPT2_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}


class Gpt2(Model):
    """LayerNorm, learned positions, GELU; biases everywhere. Dropout after the embedding, too."""

    HF_ARCHITECTURES: ClassVar[tuple[str, ...]] = ("GPT2LMHeadModel",)

    architecture: Literal["gpt2"]
    ffn_dim: int | None = Field(None, ge=8)
    """Hidden width of the feed-forward; null means 4 dim."""
    positions: int = Field(1024, ge=1, le=2**24)
    """Rows of the table of positions: no sample may be longer (train.seq_len)."""
    norm_eps: float = Field(1e-5, gt=0)
    """Epsilon of LayerNorm."""

    @model_validator(mode="after")
    def _heads_divide_the_width(self) -> Self:
        if self.dim % self.heads and not self.waits_for_shape:
            raise ValueError(f"dim {self.dim} is not a multiple of heads {self.heads}")
        return self

    @property
    def inner_dim(self) -> int:
        return self.ffn_dim or 4 * self.dim

    @property
    def longest_sample(self) -> int:
        return self.positions

    # --- counts ---

    @property
    def block_parameters(self) -> int:
        matrices = 4 * self.dim**2 + 2 * self.dim * self.inner_dim
        biases = 5 * self.dim + self.inner_dim
        return matrices + biases + 4 * self.dim  # two norms

    def outer_parameters(self, num_rows: int) -> int:
        bias_of_norm = self.dim
        return super().outer_parameters(num_rows) + self.positions * self.dim + bias_of_norm

    def looked_up(self, num_rows: int) -> int:
        return super().looked_up(num_rows) + self.positions * self.dim

    def activations(self, size: int) -> Activations:
        width, wide = self.dim, self.inner_dim
        statistics = 4 * self.heads + 16  # of attention and norms, in fp32
        # Inputs of two norms, of attention and of the feed-forward; queries, keys, values and attention's
        # output; and of the feed-forward, what goes into GELU and what comes out.
        whole = 8 * width + 2 * wide
        # The input of the block, and what three products and attention give; of the fourth where it is as
        # narrow as queries, keys and values together.
        narrow = 7 * width + (wide if wide <= 3 * width else 0)
        return Activations(size * whole + statistics, size * narrow + statistics)

    # --- as transformers has it ---

    @classmethod
    def hf_misfits(cls, values: dict[str, Any], seq_len: int) -> Iterator[str]:
        values = _with_defaults(values)
        yield from not_given(values, GPT2_NUMBERS, may_be_null={"n_inner"})
        yield from not_neutral(values, GPT2_NEUTRAL)
        positions = values.get("n_positions")
        if isinstance(positions, int) and positions < seq_len:
            yield f"n_positions is {positions}, smaller than train.seq_len {seq_len}"

    @classmethod
    def keys_of_hf(cls, values: dict[str, Any]) -> dict[str, Any]:
        values = _with_defaults(values)
        keys = {ours: values[theirs] for theirs, ours in GPT2_NUMBERS.items()}
        if keys["ffn_dim"] is None and isinstance(keys["dim"], int):
            keys["ffn_dim"] = 4 * keys["dim"]
        return keys

    def to_hf(self, seq_len: int) -> dict[str, Any]:
        return {
            "model_type": "gpt2",
            "n_embd": self.dim,
            "n_layer": self.layers,
            "n_head": self.heads,
            "n_inner": self.inner_dim,
            "n_positions": self.positions,
            "layer_norm_epsilon": self.norm_eps,
            "activation_function": "gelu_new",
            "initializer_range": INIT_STD,
            # The defaults of transformers are 0.1.
            **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
        }

    def hf_tensor(self, name: str) -> str | None:
        if name.endswith((".attn.bias", ".attn.masked_bias")):
            return None  # masks, which early versions of transformers stored
        # The files of OpenAI's weights have the names inside of `transformer`.
        is_inside = name.startswith(("wte.", "wpe.", "h.", "ln_f."))
        return f"transformer.{name}" if is_inside else name

    def is_transposed_in_hf(self, name: str) -> bool:
        return name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))


def _with_defaults(values: dict[str, Any]) -> dict[str, Any]:
    by_alias = {ours: values[alias] for alias, ours in GPT2_ALIASES.items() if alias in values}
    return {**GPT2_DEFAULTS, **values, **by_alias}
