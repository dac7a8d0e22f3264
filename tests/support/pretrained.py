"""Tiny random models as transformers' save_pretrained writes them, with a tokenizer beside them."""

from __future__ import annotations

import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from forge.core.config import Config
from forge.core.models.architectures import ARCHITECTURES
from forge.core.models.base import Model
from forge.trainer import pretrained
from forge.trainer.models.decoder import Decoder, make_decoder

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
# Name -> class of transformers, and what differs from SIZES.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"rope_parameters": LLAMA3, "num_key_value_heads": 2}),
    "llama-tied": ("LlamaForCausalLM", {"tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
    "mistral": ("MistralForCausalLM", {"sliding_window": None, "head_dim": 12}),
    "qwen3": (
        "Qwen3ForCausalLM",
        {"head_dim": 24, "tie_word_embeddings": True, "num_key_value_heads": 2},
    ),
    "olmo2": ("Olmo2ForCausalLM", {"rope_parameters": {**PLAIN, "rope_theta": 5e5}}),
}
# And each class that no row has, with nothing but SIZES.
MODELS |= {
    f"{name}-{kind}" if number else name: (kind, {})
    for name, model in ARCHITECTURES.items()
    for number, kind in enumerate(model.HF_ARCHITECTURES)
    if kind not in [known for known, _ in MODELS.values()]
}
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 300,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "rope_parameters": PLAIN,
}


def random_model(name: str, **more: Any) -> Any:
    """A model of transformers, with weights by which any mistake shows, those of its norms included."""
    import transformers

    kind, differs = MODELS[name]
    torch.manual_seed(0)
    made_by = getattr(transformers, kind)
    model = made_by(made_by.config_class(**deepcopy(SIZES | differs | more))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.1)
    return model


def save(
    model: Any,
    folder: Path,
    *,
    dtype: str = "float32",
    files: int = 1,
    tokenizer: Path | None = None,
) -> Path:
    """Write the model, in about so many files; tokenizer: the directory of Forge's."""
    model = model.to(getattr(torch, dtype))
    size = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(folder, max_shard_size=size // files + 1)
    for file in tokenizer.glob("tokenizer*.json") if tokenizer else ():
        shutil.copy(file, folder)
    return folder


def config_of(folder: Path, **sections: dict) -> Config:
    """A config that starts from the weights in a directory."""
    (folder / "corpus.txt").write_text("text")
    if not (folder / "tokenizer.json").exists():
        (folder / "tokenizer.json").write_text("{}")
    return Config.model_validate(
        {
            "data": str(folder / "data"),
            "tokenize": {"inputs": [str(folder / "corpus.txt")]},
            "model": {"init": {"path": str(folder)}},
            "train": {"seq_len": 128},
            **sections,
        }
    )


def loaded(model: Model, files: list[Path]) -> Decoder:
    """The decoder of these settings with the tensors of these files."""
    decoder = make_decoder(model, model.num_rows(0)).to_empty(device="cpu")
    pretrained.read(decoder, files)
    return decoder.eval()
