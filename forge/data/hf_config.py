"""A config.json of Hugging Face as keys of `model`: which models fit, and why others do not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from forge.core.errors import ConfigError
from forge.core.model_settings import Model
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
# Keys that would change the forward pass, with the values that do not; a missing key counts as None.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "partial_rotary_factor": (1, None),
    "clip_qkv": (None,),
    "quantization_config": (None,),
}
# rope_type llama3: key in config.json -> key of model.rope_scaling.
LLAMA3 = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_tokens",
}


@dataclass(frozen=True)
class Family:
    """An architecture of transformers that the decoder can be."""

    architecture: str
    model_type: str
    norm: Literal["pre", "post"] = "pre"
    qk_norm: Literal["none", "head", "full"] = "none"
    defaults: dict[str, Any] = field(default_factory=dict)
    """Values of keys that a config.json may leave out."""


# Mistral comes after Llama: without a window it is the same, and exported as Llama.
FAMILIES = (
    Family(
        "LlamaForCausalLM",
        "llama",
        # num_key_value_heads and rope_theta: the first Llama had neither key.
        defaults={"head_dim": None, "num_key_value_heads": None, "rope_theta": 10000.0},
    ),
    Family(
        "MistralForCausalLM",
        "mistral",
        defaults={"head_dim": None, "rope_theta": 10000.0, "sliding_window": 4096},
    ),
    Family("Qwen3ForCausalLM", "qwen3", qk_norm="head", defaults={"head_dim": 128}),
    Family(
        "Olmo2ForCausalLM",
        "olmo2",
        norm="post",
        qk_norm="full",
        defaults={"head_dim": None, "num_key_value_heads": None},
    ),
)


def model_keys(values: dict[str, Any], seq_len: int, where: str) -> dict[str, Any]:
    """The keys of `model` that a config.json sets. where: its place, for errors.

    seq_len: train.seq_len. Raises ConfigError that names each key and value that does not fit.
    """
    family = _family(values, where)
    values = {**family.defaults, "tie_word_embeddings": False, **values}
    rope = _rope(values)
    if problems := [
        *_missing(values, rope),
        *_not_neutral(values),
        *_window(values, family, seq_len),
        *_other_rope(rope),
    ]:
        raise ConfigError(
            f"{where} does not fit: {'; '.join(problems)}",
            cause="Forge's decoder has nothing like it, and would train another model",
            fix="choose other weights; docs/huggingface.md lists what fits",
        )
    keys = {ours: values[theirs] for theirs, ours in NUMBERS.items()}
    if keys["kv_heads"] is None:
        keys["kv_heads"] = keys["heads"]
    scaling = {ours: rope[theirs] for theirs, ours in LLAMA3.items()} if _kind(rope) else None
    return {
        **keys,
        "norm": family.norm,
        "qk_norm": family.qk_norm,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaling,
    }


def family_of(model: Model) -> Family:
    """The architecture by which transformers loads such a model. Raises ConfigError where none fits."""
    for family in FAMILIES:
        if (family.norm, family.qk_norm) == (model.norm, model.qk_norm):
            return family
    raise ConfigError(
        f"transformers has no architecture with model.norm {model.norm} and model.qk_norm"
        f" {model.qk_norm}",
        cause="it knows pre/none (Llama), pre/head (Qwen3) and post/full (OLMo 2)",
        fix="train one of these, to export it",
    )


def _family(values: dict[str, Any], where: str) -> Family:
    named = values.get("architectures")
    for family in FAMILIES:
        if named == [family.architecture]:
            return family
    known = ", ".join(family.architecture for family in FAMILIES)
    raise ConfigError(
        f"{where} does not fit: architectures is {shown(named)}",
        cause=f"Forge's decoder can be {known}",
        fix="choose other weights; docs/huggingface.md lists what fits",
    )


def _rope(values: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings as transformers 5 writes them, also where those of 4 are there."""
    scaling = values.get("rope_parameters") or values.get("rope_scaling") or {}
    theta = {"rope_theta": values["rope_theta"]} if "rope_theta" in values else {}
    return {**theta, **scaling} if isinstance(scaling, dict) else {"rope_type": scaling}


def _kind(rope: dict[str, Any]) -> Any:
    """The type of scaling; None for none."""
    kind = rope.get("rope_type", rope.get("type"))
    return None if kind == "default" else kind


def _missing(values: dict[str, Any], rope: dict[str, Any]) -> Iterator[str]:
    missing = [key for key in NUMBERS if key not in values]
    missing += [] if "rope_theta" in rope else ["rope_theta"]
    if _kind(rope) == "llama3":
        missing += [key for key in LLAMA3 if key not in rope]
    if missing:
        yield f"it has no {', '.join(missing)}"


def _not_neutral(values: dict[str, Any]) -> Iterator[str]:
    for key, neutral in NEUTRAL.items():
        if (value := values.get(key)) not in neutral:
            yield f"{key} is {shown(value)}"


def _window(values: dict[str, Any], family: Family, seq_len: int) -> Iterator[str]:
    """Sliding windows, which do nothing to samples that are not longer."""
    window = values.get("sliding_window")
    used = values.get("use_sliding_window", family.model_type == "mistral")
    if used and window is not None and window < seq_len:
        yield f"sliding_window is {window}, smaller than train.seq_len {seq_len}"
    others = {*(values.get("layer_types") or ())} - {"full_attention"}
    if others and not used:
        yield f"layer_types has {', '.join(map(str, sorted(others)))}"


def _other_rope(rope: dict[str, Any]) -> Iterator[str]:
    if (kind := _kind(rope)) not in (None, "llama3"):
        yield f"rope_type is {shown(kind)}"
    if rope.get("partial_rotary_factor", 1) != 1:
        yield f"partial_rotary_factor is {rope['partial_rotary_factor']}"
