"""A config.json that is taken for another model trains without a word: what fits is compared with the
parameter counts of the models' cards, what does not is refused by key and value."""

from typing import Any

import pytest
from support.repository import REPOSITORY

from forge.core.config import Config, load_config
from forge.core.errors import ConfigError
from forge.core.models.architectures import ARCHITECTURES, model_keys
from forge.core.models.llama import Llama

LLAMA_31_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
MISTRAL_7B_V03 = {
    "architectures": ["MistralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32768,
}
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
OLMO2_1B = {
    "architectures": ["Olmo2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "model_type": "olmo2",
    "num_attention_heads": 16,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "vocab_size": 100352,
}
GPT2_124M = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "vocab_size": 50257,
}
LLAMA_1 = {
    key: LLAMA_31_8B[key]
    for key in (
        *("architectures", "hidden_act", "hidden_size", "num_attention_heads", "rms_norm_eps"),
        "num_hidden_layers",
    )
} | {"intermediate_size": 11008, "vocab_size": 32000}

# As transformers 5 writes it.
LLAMA_5 = {key: LLAMA_31_8B[key] for key in LLAMA_31_8B.keys() - {"rope_theta", "rope_scaling"}} | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}
}


def keys(values: dict[str, Any], seq_len: int = 1024) -> dict[str, Any]:
    return model_keys(values, seq_len, "team/model@main/config.json")


@pytest.mark.parametrize(
    ("values", "parameters"),
    [
        (LLAMA_31_8B, 8_030_261_248),
        (MISTRAL_7B_V03, 7_248_023_552),
        (QWEN3_06B, 596_049_920),
        (OLMO2_1B, 1_484_916_736),
        (LLAMA_1, 6_738_415_616),
        (GPT2_124M, 124_439_808),
        ({**GPT2_124M, "n_embd": 1600, "n_layer": 48, "n_head": 25}, 1_557_611_200),
    ],
    ids=[
        *("Llama-3.1-8B", "Mistral-7B-v0.3", "Qwen3-0.6B", "OLMo-2-1B", "Llama-1-7B"),
        *("gpt2", "gpt2-xl"),
    ],
)
def test_published_models_have_the_parameters_of_their_cards(values, parameters):
    model = Config.model_validate({"model": keys(values)}).model
    assert model.num_parameters(10) == parameters
    # An export of Mistral is a Llama.
    exported = model.hf_architecture.replace("Llama", values["architectures"][0][:-11])
    assert exported == values["architectures"][0]


def test_every_number_is_taken_over():
    assert keys(LLAMA_31_8B) == {
        "architecture": "llama",
        **{"dim": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "head_dim": None},
        **{"ffn_dim": 14336, "vocab_size": 128256, "norm_eps": 1e-5, "tie_embeddings": False},
        **{"norm": "pre", "qk_norm": "none", "rope_theta": 500000.0},
        "rope_scaling": {
            **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            "original_tokens": 8192,
        },
    }
    qwen3 = keys(QWEN3_06B)
    assert (qwen3["head_dim"], qwen3["qk_norm"], qwen3["rope_scaling"]) == (128, "head", None)
    olmo2 = keys(OLMO2_1B)
    assert (olmo2["norm"], olmo2["qk_norm"], olmo2["norm_eps"]) == ("post", "full", 1e-6)


def test_what_transformers_5_writes_is_the_same():
    rope = LLAMA_31_8B["rope_scaling"] | {"rope_theta": 500000.0}
    rest = {k: v for k, v in LLAMA_31_8B.items() if k not in ("rope_scaling", "rope_theta")}
    assert keys({**rest, "rope_parameters": rope}) == keys(LLAMA_31_8B)


@pytest.mark.parametrize(
    ("values", "change", "message"),
    [
        (LLAMA_31_8B, {"architectures": ["MixtralForCausalLM"]}, "architectures is .*Mixtral"),
        (LLAMA_31_8B, {"architectures": ["Qwen2ForCausalLM"]}, "architectures is .*Qwen2"),
        (LLAMA_31_8B, {"architectures": None}, "architectures is None"),
        (LLAMA_31_8B, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (LLAMA_31_8B, {"attention_bias": True}, "attention_bias is True"),
        (LLAMA_31_8B, {"mlp_bias": True}, "mlp_bias is True"),
        (LLAMA_31_8B, {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        (LLAMA_31_8B, {"quantization_config": {"bits": 4}}, "quantization_config is .*bits"),
        (LLAMA_31_8B, {"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type is 'linear'"),
        (LLAMA_31_8B, {"rope_scaling": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
        (LLAMA_31_8B, {"rope_scaling": {"rope_type": "llama3"}}, "it has no factor, low_freq"),
        (LLAMA_31_8B, {"rope_scaling": {"partial_rotary_factor": 0.5}}, "rotary_factor is 0.5"),
        (LLAMA_31_8B, {"hidden_size": ...}, "it has no hidden_size"),
        (QWEN3_06B, {"rope_theta": ...}, "it has no rope_theta"),
        (QWEN3_06B, {"num_key_value_heads": ...}, "it has no num_key_value_heads"),
        (
            QWEN3_06B,
            {"use_sliding_window": True, "sliding_window": 1024},
            "sliding_window is 1024, smaller than train.seq_len 4096",
        ),
        (QWEN3_06B, {"layer_types": ["sliding_attention"]}, "layer_types has sliding_attention"),
        (MISTRAL_7B_V03, {"sliding_window": 4095}, "sliding_window is 4095"),
        (
            MISTRAL_7B_V03,
            {"sliding_window": 1024, "use_sliding_window": False},  # the class lacks the latter
            "sliding_window is 1024",
        ),
        (MISTRAL_7B_V03, {"sliding_window": "long"}, "sliding_window is 'long'"),
        (QWEN3_06B, {"layer_types": 7}, "layer_types is 7"),
        (MISTRAL_7B_V03, {"layer_types": ["sliding_attention"]}, "layer_types has sliding_att"),
        (LLAMA_5, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'"),
        (LLAMA_5, {"rope_scaling": {"rope_type": "linear", "factor": 2}}, "rope_type is 'linear'"),
        (LLAMA_5, {"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_type is 'dynamic'"),
        (LLAMA_5, {"rope_scaling": {"rope_type": None}}, "rope_type is None"),
        (LLAMA_5, {"rope_scaling": "yarn"}, "rope_type is 'yarn'"),
        (LLAMA_5, {"rope_scaling": 7}, "rope_type is 7"),
        (
            LLAMA_5,
            {"rope_scaling": LLAMA_31_8B["rope_scaling"]},
            "rope_scaling replaces rope_parameters, whose rope_theta 500000.0 is lost",
        ),
        (
            LLAMA_31_8B,
            {"original_max_position_embeddings": 4096},
            "original_max_position_embeddings is 4096, and 8192 among the rotary settings",
        ),
        (
            LLAMA_5,
            {"rope_parameters": {"full_attention": {"rope_theta": 5e5}}},
            r"rope_parameters differ by layer \(full_attention\)",
        ),
        (LLAMA_31_8B, {"model_type": "mistral"}, "model_type is 'mistral'"),
        (GPT2_124M, {"model_type": "llama"}, "model_type is 'llama'"),
        (LLAMA_31_8B, {"vocab_size": None}, "vocab_size is None"),
        (GPT2_124M, {"vocab_size": None}, "vocab_size is None"),
        (LLAMA_31_8B, {"intermediate_size": None}, "intermediate_size is None"),
        (QWEN3_06B, {"head_dim": None}, "head_dim is None"),
        (LLAMA_31_8B, {"hidden_act": None}, "hidden_act is None"),
        (LLAMA_31_8B, {"is_causal": False}, "is_causal is False"),
        (LLAMA_31_8B, {"per_layer_config": {"0": {}}}, "per_layer_config is "),
        (LLAMA_31_8B, {"transformers_weights": "other.safetensors"}, "transformers_weights is "),
        (LLAMA_31_8B, {"attribute_map": {"head_dim": "hidden_size"}}, "attribute_map is "),
        (LLAMA_31_8B, {"text_config": {"tie_word_embeddings": True}}, "text_config is "),
        (GPT2_124M, {"max_position_embeddings": 512}, "n_positions is 512, smaller than"),
        (GPT2_124M, {"n_positions": 4095}, "n_positions is 4095, smaller than train.seq_len 4096"),
        (GPT2_124M, {"activation_function": "relu"}, "activation_function is 'relu'"),
        (GPT2_124M, {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx is True"),
        (GPT2_124M, {"n_head": ..., "n_positions": 4096}, "it has no n_head"),
    ],
)
def test_what_does_not_fit_is_named_with_its_value(values, change, message):
    changed = {key: value for key, value in (values | change).items() if value is not ...}
    with pytest.raises(ConfigError, match=message):
        keys(changed, 4096)


def test_rope_scaling_replaces_rope_parameters_as_in_transformers_and_that_is_said(capsys):
    scaling = LLAMA_31_8B["rope_scaling"] | {"rope_theta": 7.0}
    assert keys({**LLAMA_5, "rope_scaling": scaling}) == {**keys(LLAMA_31_8B), "rope_theta": 7.0}
    assert "warning: team/model@main/config.json: rope_scaling replaces" in capsys.readouterr().err
    keys({**LLAMA_5, "rope_parameters": {"rope_type": "llama3"}, "rope_scaling": scaling})
    assert "warning: " in capsys.readouterr().err
    for nothing in ({}, None):
        assert keys({**LLAMA_5, "rope_scaling": nothing}) == keys(LLAMA_5)
    # As an export of Forge has both, for transformers 4 and 5.
    keys({**LLAMA_31_8B, "rope_parameters": {**LLAMA_31_8B["rope_scaling"], "rope_theta": 5e5}})
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("values", "change"),
    [
        (LLAMA_31_8B, {"sliding_window": 16, "use_sliding_window": True}),
        (OLMO2_1B, {"sliding_window": 16, "mlp_bias": True}),
        (MISTRAL_7B_V03, {"attention_bias": True, "mlp_bias": True}),
        (QWEN3_06B, {"sliding_window": 16, "clip_qkv": 8}),
        (GPT2_124M, {"hidden_act": "relu", "rope_scaling": {"rope_type": "yarn"}}),
        (GPT2_124M, {"reorder_and_upcast_attn": True}),  # the same numbers in another order
    ],
)
def test_keys_that_the_class_of_transformers_lacks_change_nothing(values, change):
    assert keys({**values, **change}) == keys(values)


def test_second_names_of_gpt2_win_as_in_transformers():
    assert keys({**GPT2_124M, "num_hidden_layers": 3})["layers"] == 3
    other = {"hidden_size": 768, "num_attention_heads": 12, "max_position_embeddings": 1024}
    left_out = {key: value for key, value in GPT2_124M.items() if not key.startswith("n_")}
    assert keys({**left_out, **other, "num_hidden_layers": 12}) == keys(GPT2_124M)


def test_a_window_as_long_as_the_samples_does_nothing():
    window = {**MISTRAL_7B_V03, "sliding_window": 4096}
    assert keys(window, 4096) == keys(MISTRAL_7B_V03)
    without = {key: value for key, value in window.items() if key != "sliding_window"}
    used = {**QWEN3_06B, "use_sliding_window": True}
    del used["sliding_window"]
    for values in (without, used):
        with pytest.raises(ConfigError, match="sliding_window is 4096"):  # transformers' default
            keys(values, 4097)


def test_a_model_that_transformers_does_not_have_is_named():
    with pytest.raises(ConfigError, match=r"model.norm post and model.qk_norm none"):
        _ = Llama(norm="post").hf_architecture


# --- model.architecture in a config ---------------------------------------------------------------


def test_page_lists_each_architecture_of_transformers():
    page = (REPOSITORY / "docs/huggingface.md").read_text()
    for model in ARCHITECTURES.values():
        for kind in model.HF_ARCHITECTURES:
            assert f"| `{kind}` |" in page, kind


@pytest.mark.parametrize("name", ["gpt3", None, 7, ["gpt2"], {"a": "b"}])
def test_an_unknown_architecture_is_refused_with_the_known_ones(name):
    with pytest.raises(ConfigError, match=r"model: architecture is .*: must be one of llama, gpt2"):
        load_config("/dev/null", {"model.architecture": name})


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"kv_heads": 2}, "unknown key model.kv_heads .*of the 11 keys of model"),
        ({"positions": 100}, "train.seq_len is 256, and the gpt2 has 100 positions"),
        ({"heads": 5}, "model: dim 256 is not a multiple of heads 5"),
        ({"layers": "two"}, "model.layers is 'two'"),
    ],
)
def test_errors_name_the_keys_of_the_architecture_without_its_name(model, message):
    with pytest.raises(ConfigError, match=message):
        load_config("/dev/null", {"model": {"architecture": "gpt2", **model}})


def test_a_config_without_the_key_has_a_llama():
    assert isinstance(load_config("/dev/null", {"model.layers": 2}).model, Llama)


def test_numbers_of_another_type_in_a_config_json_are_a_config_error():
    model = keys({**GPT2_124M, "n_embd": "wide"})
    with pytest.raises(ConfigError, match=r"model.dim is 'wide'"):
        load_config("/dev/null", {"model": model})
