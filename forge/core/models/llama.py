"""Llama, which is also Mistral, Qwen3 and OLMo 2: keys, counts, and its form in transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from forge.core.errors import ConfigError
from forge.core.models.base import INIT_STD, Activations, Model, not_given, not_neutral
from forge.core.section import Section
from forge.core.values import shown

# Each number: key in config.json -> key of `model`.
NUMBERS = {
    "hidden_size": "dim",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "ffn_dim",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
}
# Keys of all families that would change the forward pass, with the values that do not.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_dropout": (0, None),
    "partial_rotary_factor": (1, None),
}
NO_BIAS = {"attention_bias": (False,)}
# rope_type llama3: key in config.json -> key of model.rope_scaling.
LLAMA3 = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_tokens",
}


@dataclass(frozen=True)
class Family:
    """An architecture of transformers that the decoder can be, and the keys of `model` that tell it."""

    architecture: str
    model_type: str
    norm: Literal["pre", "post"] = "pre"
    qk_norm: Literal["none", "head", "full"] = "none"
    defaults: dict[str, Any] = field(default_factory=dict)
    """Values of keys that a config.json may leave out. A sliding window is a key of a family that has it
    here; in the config.json of another family transformers ignores it."""
    neutral: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """As NEUTRAL, of keys that not all families have."""


# Mistral comes after Llama: without a window it is the same, and exported as Llama.
FAMILIES = (
    Family(
        "LlamaForCausalLM",
        "llama",
        # num_key_value_heads and rope_theta: the first Llama had neither key.
        defaults={"head_dim": None, "num_key_value_heads": None, "rope_theta": 10000.0},
        neutral={**NO_BIAS, "mlp_bias": (False,)},
    ),
    Family(
        "MistralForCausalLM",
        "mistral",
        defaults={"head_dim": None, "rope_theta": 10000.0, "sliding_window": 4096},
    ),
    Family(
        "Qwen3ForCausalLM",
        "qwen3",
        qk_norm="head",
        defaults={"head_dim": 128, "sliding_window": 4096, "use_sliding_window": False},
        neutral=NO_BIAS,
    ),
    Family(
        "Olmo2ForCausalLM",
        "olmo2",
        norm="post",
        qk_norm="full",
        defaults={"head_dim": None, "num_key_value_heads": None},
        neutral=NO_BIAS,
    ),
)


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


class Llama(Model):
    """RMSNorm, rotary positions, grouped-query attention, SwiGLU. Also Mistral, Qwen3 and OLMo 2."""

    HF_ARCHITECTURES: ClassVar[tuple[str, ...]] = tuple(family.architecture for family in FAMILIES)

    architecture: Literal["llama"] = "llama"
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

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.waits_for_shape:
            return self
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
    def inner_dim(self) -> int:
        return self.ffn_dim or -(-(8 * self.dim // 3) // 64) * 64

    # --- counts ---

    @property
    def block_parameters(self) -> int:
        attention = 2 * self.dim * (self.query_dim + self.kv_dim)
        feed_forward = 3 * self.dim * self.inner_dim
        of_queries = {
            "none": 0,
            "head": 2 * self.head_width,
            "full": self.query_dim + self.kv_dim,
        }
        return attention + feed_forward + 2 * self.dim + of_queries[self.qk_norm]

    def activations(self, size: int) -> Activations:
        width, wide, kv, queries = self.dim, self.inner_dim, self.kv_dim, self.query_dim
        statistics = 4 * self.heads + 8  # of attention and norms, in fp32
        # Inputs of two norms, of attention and of the feed-forward; queries and attention's output; keys
        # and values, and before their norms queries and keys; and of the feed-forward gate, its
        # activation, up and their product.
        unnormed = queries + kv if self.qk_norm != "none" else 0
        whole = 4 * width + 2 * queries + 2 * kv + unnormed + 4 * wide
        narrow = 3 * width + 2 * queries + 2 * kv
        return Activations(size * whole + statistics, size * narrow + statistics)

    def float8_widths(self) -> dict[str, int]:
        heads = {
            "the width of all query heads": self.query_dim,
            "the width of all key heads": self.kv_dim,
        }
        return {**super().float8_widths(), **heads}

    # --- as transformers has it ---

    @classmethod
    def hf_misfits(cls, values: dict[str, Any], seq_len: int) -> Iterator[str]:
        family, values = _family(values), _with_defaults(values)
        may_be_null = {key for key, value in family.defaults.items() if value is None}
        yield from not_given(values, NUMBERS, may_be_null | {"num_key_value_heads"})
        of_family = {"model_type": (family.model_type,), **family.neutral}
        yield from not_neutral(values, NEUTRAL | of_family)
        yield from _window(values, seq_len)
        yield from _other_rope(values)

    @classmethod
    def hf_choices(cls, values: dict[str, Any]) -> Iterator[str]:
        values = _with_defaults(values)
        taken, replaced = _rope(values), _rope({**values, "rope_scaling": None})
        same = _kind(taken) == _kind(replaced) and all(
            taken.get(key) == replaced.get(key) for key in ("rope_theta", *LLAMA3)
        )
        if values.get("rope_scaling") and values.get("rope_parameters") and not same:
            yield "rope_scaling replaces the rope_parameters beside it, as in transformers"

    @classmethod
    def keys_of_hf(cls, values: dict[str, Any]) -> dict[str, Any]:
        family, values = _family(values), _with_defaults(values)
        keys, rope = {ours: values[theirs] for theirs, ours in NUMBERS.items()}, _rope(values)
        if keys["kv_heads"] is None:
            keys["kv_heads"] = keys["heads"]
        scaling = (
            {ours: rope[theirs] for theirs, ours in LLAMA3.items()}
            if _kind(rope) == "llama3"
            else None
        )
        return {
            **keys,
            "norm": family.norm,
            "qk_norm": family.qk_norm,
            "rope_theta": rope["rope_theta"],
            "rope_scaling": scaling,
        }

    @property
    def hf_architecture(self) -> str:
        return self._hf_family.architecture

    @property
    def _hf_family(self) -> Family:
        for family in FAMILIES:
            if (family.norm, family.qk_norm) == (self.norm, self.qk_norm):
                return family
        raise ConfigError(
            f"transformers has no architecture with model.norm {self.norm} and model.qk_norm"
            f" {self.qk_norm}",
            cause="it knows pre/none (Llama), pre/head (Qwen3) and post/full (OLMo 2)",
            fix="train one of these, to export it",
        )

    def to_hf(self, seq_len: int) -> dict[str, Any]:
        rope: dict[str, Any] = {"rope_type": "default"}
        longest, old = seq_len, {}
        if scaling := self.rope_scaling:
            numbers = {theirs: getattr(scaling, ours) for theirs, ours in LLAMA3.items()}
            rope = {"rope_type": "llama3", **numbers}
            longest = max(longest, int(scaling.factor * scaling.original_tokens))
            old = {"rope_scaling": rope}
        return {
            "model_type": self._hf_family.model_type,
            "hidden_size": self.dim,
            "intermediate_size": self.inner_dim,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_width,
            "hidden_act": "silu",
            "max_position_embeddings": longest,
            "initializer_range": INIT_STD,
            "rms_norm_eps": self.norm_eps,
            "rope_parameters": {**rope, "rope_theta": self.rope_theta},
            "rope_theta": self.rope_theta,  # these two for transformers 4
            **old,
            "attention_bias": False,
            "mlp_bias": False,
        }

    def hf_tensor(self, name: str) -> str | None:
        # Buffers that early versions of transformers stored; the decoder computes them.
        return None if name.endswith(".rotary_emb.inv_freq") else name


# --- a config.json ------------------------------------------------------------------------------


def _family(values: dict[str, Any]) -> Family:
    return next(family for family in FAMILIES if [family.architecture] == values["architectures"])


def _with_defaults(values: dict[str, Any]) -> dict[str, Any]:
    return {**_family(values).defaults, "tie_word_embeddings": False, **values}


def _rope(values: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings as transformers 5 resolves them, also those that transformers 4 wrote.

    rope_scaling replaces rope_parameters as a whole, unless it is empty: `convert_rope_params_to_dict` of
    transformers (modeling_rope_utils.py).
    """
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    theta = {"rope_theta": values["rope_theta"]} if "rope_theta" in values else {}
    return {**theta, **rope} if isinstance(rope, dict) else {"rope_type": rope}


def _kind(rope: dict[str, Any]) -> Any:
    """The type of scaling."""
    return rope.get("rope_type", rope.get("type", "default"))


def _window(values: dict[str, Any], seq_len: int) -> Iterator[str]:
    """Sliding windows, which do nothing to samples that are not longer."""
    known = _family(values).defaults
    window = values["sliding_window"] if "sliding_window" in known else None
    if "use_sliding_window" in known and not values["use_sliding_window"]:
        window = None
    if window is None:
        yield from _windowed_layers(values.get("layer_types"))
    elif not isinstance(window, int):
        yield f"sliding_window is {shown(window)}"
    elif window < seq_len:
        yield f"sliding_window is {window}, smaller than train.seq_len {seq_len}"


def _windowed_layers(layer_types: Any) -> Iterator[str]:
    if layer_types is not None and not isinstance(layer_types, list):
        yield f"layer_types is {shown(layer_types)}"
    elif others := {str(kind) for kind in layer_types or ()} - {"full_attention"}:
        yield f"layer_types has {', '.join(sorted(others))}"


def _other_rope(values: dict[str, Any]) -> Iterator[str]:
    rope = _rope(values)
    kind = _kind(rope)
    needed = ["rope_theta", *(LLAMA3 if kind == "llama3" else ())]
    if missing := [key for key in needed if key not in rope]:
        yield f"it has no {', '.join(missing)}"
    if kind not in ("default", "llama3"):
        yield f"rope_type is {shown(kind)}"
    if rope.get("partial_rotary_factor", 1) != 1:
        yield f"partial_rotary_factor is {rope['partial_rotary_factor']}"
    if of_layers := [key for key, value in rope.items() if isinstance(value, dict)]:
        yield f"rope_parameters differ by layer ({', '.join(of_layers)})"
    yield from _contradictions(values, rope)


def _contradictions(values: dict[str, Any], rope: dict[str, Any]) -> Iterator[str]:
    """Numbers that a config.json has twice, of which transformers silently takes one."""
    length = "original_max_position_embeddings"
    found, outside = rope.get(length), values.get(length, rope.get(length))
    if _kind(rope) == "llama3" and found != outside:
        yield f"{length} is {shown(outside)}, and {shown(found)} among the rotary settings"
    scaling, replaced = values.get("rope_scaling"), values.get("rope_parameters")
    if isinstance(scaling, dict) and scaling and isinstance(replaced, dict):
        lost = replaced.get("rope_theta", rope.get("rope_theta"))
        if "rope_theta" not in scaling and lost != rope.get("rope_theta"):
            yield f"rope_scaling replaces rope_parameters, whose rope_theta {shown(lost)} is lost"
