"""Every variation of a config.json and of the files beside it ends as the model that transformers
makes of them, or is refused: a key that is ignored, or a matrix that is dropped, trains another model.

What transformers does not load is refused, or read as if the changed key were not there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.pretrained import MODELS, config_of, loaded, random_model, save
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from forge.core.errors import ConfigError, ForgeError
from forge.core.models.architectures import model_keys
from forge.data import model
from forge.data.content_ids import resolve
from forge.data.model import ModelManifest, with_pretrained
from forge.trainer import pretrained
from forge.trainer.models.decoder import Decoder, make_decoder

pytestmark = pytest.mark.all

LOGITS = 1e-5  # as in test_pretrained.py
TOKENS = torch.randint(300, (2, 100), generator=torch.Generator().manual_seed(1))
MISSING: Any = object()
NAMES = [*MODELS]
# Keys of transformers' classes that change no logits. One that a new release of transformers adds fails
# the test until it is here, or read, or refused.
HARMLESS = {
    *("architectures", "transformers_version", "dtype", "id2label", "label2id", "problem_type"),
    *("output_hidden_states", "return_dict", "chunk_size_feed_forward", "is_encoder_decoder"),
    *("initializer_range", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("max_position_embeddings", "max_window_layers", "pretraining_tp"),
    *("resid_pdrop", "embd_pdrop", "attn_pdrop", "reorder_and_upcast_attn"),
    *("hidden_dropout", "attention_dropout", "classifier_dropout", "is_decoder"),
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
    "summary_first_dropout",
}

# --- a key of config.json --------------------------------------------------------------------------

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: list[Any] = [
    *({"rope_type": kind, "factor": 4.0} for kind in ("linear", "dynamic", "yarn", "longrope")),
    *({"rope_type": kind, "factor": 4.0} for kind in ("llama3", "default", "proportional", "su")),
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "longrope", "short_factor": [2.0] * 4, "long_factor": [3.0] * 4},
    LLAMA3,
    {**LLAMA3, "original_max_position_embeddings": 16},
    {**LLAMA3, "original_max_position_embeddings": 16, "rope_theta": 77.0},
    *({key: value for key, value in LLAMA3.items() if key != lacks} for lacks in LLAMA3),
    *(
        {"type": "linear", "factor": 2.0},
        {"type": "default"},
        {"type": "yarn", "rope_type": "default"},
    ),
    *(
        {"rope_type": None},
        {"type": None},
        {"rope_theta": 77.0},
        {"rope_theta": None},
        {},
        None,
        7,
        "yarn",
    ),
    {"rope_type": "default", "rope_theta": 77.0, "partial_rotary_factor": 0.5},
    {"rope_type": "default", "rope_theta": 77.0, "attention_factor": 2.0, "mscale": 3.0},
    {"full_attention": {"rope_type": "default", "rope_theta": 9.0}},
    {"full_attention": {"rope_type": "yarn", "factor": 2.0}, "sliding_attention": None},
]
# Beside the values that follow from the types of the class: those of other architectures' keys, and of
# keys that transformers reads from any config.json.
VALUES: dict[str, list[Any]] = {
    "rope_parameters": ROPES,
    "rope_scaling": ROPES,
    "rope_theta": [77.0, 10000, None, "a"],
    "partial_rotary_factor": [0.5, 1.0],
    "original_max_position_embeddings": [16, 32, None],
    "head_dim": [8, 12, 16],
    "num_key_value_heads": [1, 2, 4],
    "layer_types": [
        *(
            ["full_attention"] * 2,
            ["sliding_attention"] * 2,
            ["full_attention", "sliding_attention"],
        ),
        *(["full_attention"], ["attention"] * 2, "full_attention", 7),
    ],
    "sliding_window": [16, 99, 100, 200, "x"],
    "use_sliding_window": [True, False],
    "max_window_layers": [0, 1, 2],
    "attention_bias": [True, 0],
    "mlp_bias": [True],
    "attention_dropout": [0, 0.1],
    "hidden_act": ["gelu", "relu", "swish", "silu"],
    "activation_function": ["gelu", "relu", "gelu_pytorch_tanh", "gelu_fast", "swish"],
    "n_inner": [96, 48],
    "hidden_size": [16, 64],
    "num_hidden_layers": [1, 3],
    "num_attention_heads": [2, 8],
    "max_position_embeddings": [64, 256],
    "n_ctx": [16],
    "layer_norm_epsilon": [1e-2],
    "rms_norm_eps": [1e-2],
    "norm_eps": [1e-1],
    "scale_attn_by_inverse_layer_idx": [True],
    "reorder_and_upcast_attn": [True],
    "add_cross_attention": [True],
    "resid_pdrop": [0.3],
    "hidden_dropout": [0.5],
    "clip_qkv": [1.0],
    "logits_scaling": [8.0],
    "logit_scale": [3.0],
    "embedding_multiplier": [3.0],
    "residual_multiplier": [0.2],
    "attention_multiplier": [0.5],
    "final_logit_softcapping": [5.0],
    "query_pre_attn_scalar": [4],
    "attention_chunk_size": [8],
    "qk_norm": [True, False],
    "use_qk_norm": [False],
    "rope_interleaved": [True],
    "use_bias": [True],
    "num_experts": [4],
    "is_causal": [False, True, None],
    "is_decoder": [True],
    "is_encoder_decoder": [True],
    "per_layer_config": [{"0": {"rms_norm_eps": 0.5}}, {"1": {"sliding_window": 8}}, {}],
    "transformers_weights": ["model.safetensors", "other.safetensors"],
    "fusion_config": [{"a": True}],
    "attribute_map": [{"rms_norm_eps": "initializer_range"}, {}],
    "quantization_config": [None, {"bits": 4}, {"quant_method": "unknown"}],
    "text_config": [{"tie_word_embeddings": True, "vocab_size": 7}, None],
    "decoder": [{"a": 1}],
    "generator": [{"a": 1}],
    "model_type": ["llama", "mistral", "qwen2", "qwen3", "olmo", "olmo2", "gpt2", "gemma", "bert"],
    "torch_dtype": ["bfloat16", "float16"],
    "dtype": ["bfloat16"],
    "attn_implementation": ["eager"],
    "output_attentions": [True],
    "num_labels": [5],
    "tie_last_hidden_states": [True],
    "skip": [["attention"]],
    "tie_encoder_decoder": [True],
    "tie_embeddings": [True, False],
    "default_theta": [5.0],
    "pruned_heads": [{"0": [0]}],
    "auto_map": [{"AutoModelForCausalLM": "modeling_x.X"}],
}


def values_of_type(value: Any) -> list[Any]:
    """Other values of the type that a key has."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, max(value // 2, 1), value * 2]
    if isinstance(value, float):
        return [value * 2 + 0.1, 0.0]
    return ["gelu", "other"] if isinstance(value, str) else [True, 7, "x"]


def variations(kind: type[PreTrainedConfig], base: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """A key and a value for it, each of which differs from the config.json `base`."""
    for key in sorted({field.name for field in fields(kind)} | base.keys() | VALUES.keys()):
        found = base.get(key, getattr(kind, key, None))
        of_type = [None, *values_of_type(found)] if hasattr(kind, key) or key in base else []
        for value in [*of_type, *VALUES.get(key, ()), *([MISSING] if key in base else [])]:
            if key not in base or base[key] is not value:
                yield key, value


def written(folder: Path, values: dict[str, Any]) -> None:
    values = {key: value for key, value in values.items() if value is not MISSING}
    (folder / "config.json").write_text(json.dumps(values))
    model._cached_config.cache_clear()


@torch.no_grad()
def theirs(folder: Path) -> torch.Tensor | None:
    """Logits of transformers; None where it does not load or compute the model."""
    try:
        found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        logits: torch.Tensor = found(TOKENS)[0]
    except Exception:
        return None
    return logits


@torch.no_grad()
def ours(folder: Path) -> torch.Tensor | None:
    """Logits of Forge's decoder with the files that `forge model` records; None where it refuses."""
    shutil.rmtree(folder / "data", ignore_errors=True)
    try:
        config = resolve(config_of(folder, train={"seq_len": TOKENS.shape[1]}))
        files = ModelManifest.read(pretrained.make_model(config)).paths
        logits: torch.Tensor = loaded(config.model, files)(TOKENS)
    except ForgeError:
        return None
    return logits


def decoder_of(folder: Path) -> Decoder:
    """The decoder that these weights are meant for, empty."""
    return make_decoder(with_pretrained(config_of(folder)).model, 0)


def are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and bool((one - other).abs().max() <= LOGITS)


def end(folder: Path, base: torch.Tensor) -> str:
    """How a variation ends: refused, equal, ignored, or in words that begin with WRONG."""
    found = ours(folder)
    if found is None:
        return "refused"
    if (wanted := theirs(folder)) is None:
        return "ignored" if are_equal(found, base) else "WRONG: transformers has no such model"
    return "equal" if are_equal(found, wanted) else "WRONG: other logits than transformers"


@pytest.fixture(autouse=True)
def _quiet_and_single_threaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Models of this size take a fifth of the time without threads."""
    import transformers

    monkeypatch.setattr(transformers.utils.logging, "_tqdm_active", False)
    transformers.utils.logging.set_verbosity(transformers.utils.logging.CRITICAL)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def ends_right(ends: dict[str, str], at_least: int) -> None:
    wrong = {name: how for name, how in ends.items() if how.startswith("WRONG")}
    assert not wrong
    assert len(ends) >= at_least
    kinds = [*ends.values()]
    print({kind: kinds.count(kind) for kind in ("equal", "refused", "ignored")})
    assert kinds.count("equal") and kinds.count("refused")


@pytest.mark.parametrize("name", NAMES)
def test_each_value_of_each_key_gives_the_model_of_transformers_or_is_refused(name, tmp_path):
    folder = save(random_model(name), tmp_path / "weights")
    base = json.loads((folder / "config.json").read_text())
    logits = ours(folder)
    assert logits is not None and end(folder, logits) == "equal"
    ends = {}
    for key, value in variations(type(AutoConfig.from_pretrained(folder)), base):
        written(folder, {**base, key: value})
        ends[f"{key}: {'missing' if value is MISSING else value!r}"] = end(folder, logits)
    ends_right(ends, at_least=200)


PAIRS: list[dict[str, Any]] = [
    {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 16}, "rope_theta": 77.0},
    {"rope_scaling": LLAMA3, "rope_theta": 77.0, "max_position_embeddings": 64},
    {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "rope_theta": 77.0},
    {"rope_scaling": LLAMA3, "original_max_position_embeddings": 16},
    {
        "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 16},
        "original_max_position_embeddings": 64,
        "rope_theta": 77.0,
    },
    {"rope_parameters": MISSING, "rope_theta": 77.0},
    {"rope_parameters": MISSING, "rope_scaling": None, "rope_theta": 77.0},
    {"rope_parameters": MISSING},
    {"rope_parameters": {"rope_theta": 55.0}, "rope_theta": 77.0},
    {"rope_parameters": {"rope_theta": 55.0}, "rope_scaling": {"rope_type": "default"}},
    {
        "rope_parameters": {"rope_theta": 55.0},
        "rope_scaling": {"rope_type": "default"},
        "rope_theta": 5.0,
    },
    {
        "layer_types": ["full_attention"] * 2,
        "rope_parameters": {"full_attention": {"rope_theta": 5.0}},
    },
    {"use_sliding_window": True, "sliding_window": 16},
    {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0},
    {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 9},
    {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 0},
    {"use_sliding_window": True, "sliding_window": None, "layer_types": ["sliding_attention"] * 2},
    {"use_sliding_window": False, "sliding_window": 16},
    {"use_sliding_window": False, "sliding_window": 16, "layer_types": ["sliding_attention"] * 2},
    {"use_sliding_window": False, "sliding_window": MISSING},
    {"sliding_window": 16, "layer_types": ["sliding_attention"] * 2},
    {"attention_bias": True, "mlp_bias": True},
    {"model_type": MISSING, "attention_bias": False},
]


@pytest.mark.parametrize("name", NAMES)
def test_each_key_of_the_class_is_read_or_refused_or_known_to_be_harmless(name, tmp_path):
    folder = save(random_model(name), tmp_path)
    base = json.loads((folder / "config.json").read_text())
    kind = type(AutoConfig.from_pretrained(folder))
    known = {
        key
        for key, value in variations(kind, base)
        for beside in ({}, *PAIRS)
        if keys_of(base | beside | {key: value}) != keys_of(base | beside)
    }
    assert {field.name for field in fields(kind)} <= known | HARMLESS


def keys_of(values: dict[str, Any]) -> dict[str, Any] | None:
    """The keys of `model` that a config.json sets; None for one that is refused."""
    values = {key: value for key, value in values.items() if value is not MISSING}
    try:
        return model_keys(values, TOKENS.shape[1], "config.json")
    except ConfigError:
        return None


@pytest.mark.parametrize("name", NAMES)
def test_keys_that_act_together_give_the_model_of_transformers_or_are_refused(name, tmp_path):
    folder = save(random_model(name), tmp_path / "weights")
    base = json.loads((folder / "config.json").read_text())
    logits = ours(folder)
    ends = {}
    for changes in PAIRS:
        written(folder, base | changes)
        ends[str(changes).replace(repr(MISSING), "missing")] = end(folder, logits)
    ends_right(ends, at_least=len(PAIRS))


# --- files ----------------------------------------------------------------------------------------

Tensors = dict[str, torch.Tensor]


def without(tensors: Tensors, *names: str) -> Tensors:
    return {name: value for name, value in tensors.items() if name not in names}


def changed(all: Tensors, decoder: Decoder) -> Iterator[tuple[str, Tensors]]:
    """What the file has in place of the tensors that save_pretrained wrote. decoder: made for them."""
    head, embedding = decoder.output_name, decoder.embedding_name
    rows, inside = all[embedding], f"{decoder.TRUNK}."
    norm = f"{inside}{decoder.LAST_NORM}.weight"
    matrix = next(name for name in reversed(all) if decoder.adds_to_residual(name))
    of_block = f"{inside}{decoder.BLOCKS}"
    yield "norm missing", without(all, norm)
    yield "matrix missing", without(all, matrix)
    yield "embedding missing", without(all, embedding)
    yield "head missing", without(all, head)
    yield "only a head", {**without(all, embedding), head: rows}
    yield "equal head", {**all, head: rows.clone()}
    yield "another head", {**all, head: rows.flip(0).contiguous()}
    yield "head with one other number", {**all, head: bumped(rows)}
    yield "rounded head", {**all, head: rows.bfloat16()}
    yield "equal head in float64", {**all, head: rows.double()}
    yield "short head", {**all, head: rows[:-1].clone()}
    yield "unknown tensor", {**all, f"{inside}extra.weight": torch.ones(3)}
    biases = {f"{of_block}.{layer}.self_attn.q_proj.bias": torch.ones(32) for layer in (0, 1)}
    yield "biases of attention", {**all, **biases}
    more = {name.replace(".1.", ".2."): all[name].clone() for name in all if ".1." in name}
    yield "one more layer", {**all, **more}
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.float8_e4m3fn):
        yield str(dtype), {name: value.to(dtype) for name, value in all.items()}
    mixed = {name: value.half() if value.dim() == 1 else value for name, value in all.items()}
    yield "mixed types", mixed
    yield "transposed", {**all, matrix: all[matrix].T.contiguous()}
    yield "names without prefix", {name.removeprefix(inside): all[name] for name in all}
    yield "names with another prefix", {f"base.{name}": value for name, value in all.items()}
    yield "names of DDP", {f"module.{name}": value for name, value in all.items()}
    for kind in ("self_attn", "attention"):
        name = f"{of_block}.0.{kind}.rotary_emb.inv_freq"
        yield f"rotary buffer of {kind}", {**all, name: torch.ones(4)}
    for kind in ("attn", "attention"):
        yield (
            f"mask of {kind}",
            {**all, f"{of_block}.0.{kind}.bias": torch.ones(1, 1, 128, 128)},
        )
    lora = f"{of_block}.0.self_attn.q_proj.lora_A.weight"
    yield "adapter", {**all, lora: torch.ones(2, 32)}
    yield "two names of one tensor", {**all, embedding.removeprefix(inside): rows + 1}


def bumped(value: torch.Tensor) -> torch.Tensor:
    value = value.clone()
    value[-1, -1] += 1e-3
    return value


@pytest.mark.parametrize("name", NAMES)
def test_each_change_of_the_tensors_gives_the_model_of_transformers_or_is_refused(name, tmp_path):
    folder = save(random_model(name), tmp_path / "weights")
    file = folder / "model.safetensors"
    tensors, logits, ends = load_file(file), ours(folder), {}
    for what, changes in changed(tensors, decoder_of(folder)):
        save_file(changes, file, metadata={"format": "pt"})
        ends[what] = end(folder, logits)
    ends_right(ends, at_least=30)


def sharded(folder: Path, tensors: Tensors, again: Tensors | None = None, named: int = 3) -> None:
    """Write three shards and an index that names so many of them. again: tensors that the last shard has
    besides its own."""
    names, places = [*tensors], {}
    for shard in (1, 2, 3):
        part = {name: tensors[name] for name in names[shard - 1 :: 3]}
        file = f"model-0000{shard}-of-00003.safetensors"
        save_file(
            part | (again or {} if shard == 3 else {}), folder / file, metadata={"format": "pt"}
        )
        places |= dict.fromkeys(part, file) if shard <= named else {}
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / model.INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("name", NAMES)
def test_each_set_of_files_gives_the_model_of_transformers_or_is_refused(name, tmp_path):
    origin = save(random_model(name), tmp_path / "origin")
    tensors, logits = load_file(origin / model.WEIGHTS), ours(origin)
    older = {name: value * 0.5 for name, value in tensors.items()}
    ends: dict[str, str] = {}

    def tried(what: str, keep_single: bool, write: Callable[[Path], object]) -> None:
        folder = shutil.copytree(origin, tmp_path / "tried")
        if not keep_single:
            (folder / model.WEIGHTS).unlink()
        write(folder)
        ends[what] = end(folder, logits)
        shutil.rmtree(folder)

    def without_a_shard(folder: Path) -> None:
        sharded(folder, tensors)
        (folder / "model-00002-of-00003.safetensors").unlink()

    def with_pickle(folder: Path) -> None:
        torch.save(older, folder / "pytorch_model.bin")

    embedding = decoder_of(origin).embedding_name
    again = {embedding: older[embedding]}
    tried("shards", False, lambda folder: sharded(folder, tensors))
    tried("old shards beside a newer file", True, lambda folder: sharded(folder, older))
    tried("a tensor in two shards", False, lambda folder: sharded(folder, tensors, again))
    tried("an index without one shard", False, lambda folder: sharded(folder, tensors, named=2))
    tried("an absent shard", False, without_a_shard)
    tried("a pickle beside the file", True, with_pickle)
    tried("only a pickle", False, with_pickle)
    tried("adapter_config.json", True, lambda folder: (folder / model.ADAPTER).write_text("{}"))
    part = "shard-00000-model-00001-of-00001.safetensors"
    tried("a distributed checkpoint", True, lambda folder: save_file(older, folder / part))
    ends_right(ends, at_least=9)
