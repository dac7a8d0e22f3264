"""Facts that every model architecture has without torch, and its keys that all have in common."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, NamedTuple, Self

from pydantic import Field, model_validator

from forge.core.section import FREE, FilePath, Section
from forge.core.values import shown

HUB_NAME = r"[\w.-]+/[\w.-]+@[\w./-]+"  # owner/name@revision
INIT_STD = 0.02  # GPT-2, also used by Llama's Hugging Face config (`initializer_range`)
# Keys that transformers reads from any config.json, also where the class of the architecture lacks them
# (configuration_utils.py, modeling_utils.py, masking_utils.py), with the values that change nothing.
HF_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "is_causal": (True,),
    "per_layer_config": (None, {}),
    "transformers_weights": (None, "model.safetensors"),  # the file to read
    "fusion_config": (None,),
    "attribute_map": ({},),
    # Sections that transformers takes for the settings of the decoder.
    **dict.fromkeys(("text_config", "decoder", "generator"), (None,)),
}


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


class Activations(NamedTuple):
    """Bytes per token that a block keeps for its backward pass: all, and with train.recompute:
    selective."""

    whole: float
    narrow: float


class Model(Section):
    """A decoder: embedding, blocks that are all alike, a norm, and an output layer."""

    HF_ARCHITECTURES: ClassVar[tuple[str, ...]]
    """The names in `architectures` of a config.json of transformers that this model can be."""
    LAYERS: ClassVar[str] = ""
    """The module with the decoder, as DECODER; "" for those of Forge, trainer/models/NAME_decoder.py."""

    architecture: str
    """The layers, by name. Each architecture has keys of its own."""
    dim: int = Field(256, ge=8)
    """Width of the residual stream."""
    layers: int = Field(4, ge=1)
    """Number of decoder blocks."""
    heads: int = Field(4, ge=1)
    """Query heads."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout probability after attention and feed-forward, in training only."""
    tie_embeddings: bool = True
    """Share one matrix between input and output embeddings."""
    vocab_size: int | None = Field(None, ge=1, le=2**24)
    """Rows of the embedding, at least as many as the tokenizer has ids; null: as many."""
    init: InitSettings | None = Field(None, json_schema_extra=FREE)

    # --- shape ---

    @property
    def waits_for_shape(self) -> bool:
        """Return whether the shape is still to come, from the weights of `init` (data/model.py)."""
        return self.init is not None and self.vocab_size is None

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads."""
        return self.heads

    @property
    def head_width(self) -> int:
        return self.dim // self.heads

    @property
    def query_dim(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_width

    @property
    def kv_dim(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.num_kv_heads * self.head_width

    @property
    @abstractmethod
    def inner_dim(self) -> int:
        """Hidden width of the feed-forward."""

    @property
    def longest_sample(self) -> int | None:
        """The most tokens of a sample that the model can read, by its key `positions`; None: any
        number."""
        return None

    def num_rows(self, num_ids: int) -> int:
        """Rows of the embedding for a tokenizer with so many ids."""
        return self.vocab_size or num_ids

    # --- counts ---

    @property
    @abstractmethod
    def block_parameters(self) -> int:
        """Number of weights of a block."""

    def outer_parameters(self, num_rows: int) -> int:
        """Number of weights outside of the blocks; a tied matrix counts once. num_rows: of the
        embedding."""
        return (1 if self.tie_embeddings else 2) * num_rows * self.dim + self.dim

    def looked_up(self, num_rows: int) -> int:
        """Number of weights that are in no product: tables of which each token reads a row."""
        return 0 if self.tie_embeddings else num_rows * self.dim

    def num_parameters(self, num_ids: int) -> int:
        """Number of weights of the decoder. num_ids: of the tokenizer."""
        outside = self.outer_parameters(self.num_rows(num_ids))
        return self.layers * self.block_parameters + outside

    def flops_per_token(self, num_ids: int, seq_len: int) -> float:
        """FLOPs of forward and backward per trained token: 6 N + 12 L H K T.

        PaLM (arXiv:2204.02311), appendix B. N does not count tables that are looked up. As in the paper,
        attention counts as if it were not causal.
        """
        looked_up = self.looked_up(self.num_rows(num_ids))
        attention = 12 * self.layers * self.query_dim * seq_len
        return 6 * (self.num_parameters(num_ids) - looked_up) + attention

    @abstractmethod
    def activations(self, size: int) -> Activations:
        """Memory that a block keeps for its backward pass, in PyTorch without torch.compile. size: bytes
        of an activation."""

    def float8_widths(self) -> dict[str, int]:
        """Widths of the blocks' matrices, by their names in messages: for float8."""
        return {"model.dim": self.dim, "the width of the feed-forward": self.inner_dim}

    # --- as transformers has it ---

    @classmethod
    @abstractmethod
    def hf_misfits(cls, values: dict[str, Any], seq_len: int) -> Iterator[str]:
        """A phrase for each value in a config.json that this model cannot have. values: `architectures`
        is one of HF_ARCHITECTURES. seq_len: train.seq_len.

        A key that transformers' class of the architecture lacks is ignored, as transformers does.
        tests/unit/trainer/test_weights_of_others.py compares each key's effect.
        """

    @classmethod
    def hf_choices(cls, values: dict[str, Any]) -> Iterator[str]:
        """A phrase for each choice between two values in a config.json without misfits."""
        yield from ()

    @classmethod
    @abstractmethod
    def keys_of_hf(cls, values: dict[str, Any]) -> dict[str, Any]:
        """The keys of `model` that a config.json without misfits sets."""

    @property
    def hf_architecture(self) -> str:
        """The architecture by which transformers loads this model. Raises ConfigError where none fits."""
        return self.HF_ARCHITECTURES[0]

    @abstractmethod
    def to_hf(self, seq_len: int) -> dict[str, Any]:
        """Values of this architecture in config.json of an export, as transformers 4 and 5 read it,
        without `architectures`, vocabulary and types. seq_len: train.seq_len."""

    def hf_tensor(self, name: str) -> str | None:
        """The parameter that a tensor in a safetensors file is, by the name that it has there; None for
        what transformers does not read either. Exports have the parameters under their own names: those
        that `save_pretrained` writes, and transformers 4 and 5 read."""
        return name

    def is_transposed_in_hf(self, name: str) -> bool:
        """Return whether the files have the matrix of this parameter transposed."""
        return False


def not_neutral(values: dict[str, Any], neutral: dict[str, tuple[Any, ...]]) -> Iterator[str]:
    """A phrase for each value in a config.json that would change the forward pass. neutral: keys of the
    architecture, with the values that do not; a missing key has one of these by default."""
    for key, harmless in (HF_NEUTRAL | neutral).items():
        if key in values and values[key] not in harmless:
            yield f"{key} is {shown(values[key])}"


def not_given(
    values: dict[str, Any], numbers: Iterable[str], may_be_null: set[str]
) -> Iterator[str]:
    """Phrases for the numbers that a config.json lacks, or has as null."""
    if missing := [key for key in numbers if key not in values]:
        yield f"it has no {', '.join(missing)}"
    for key in numbers:
        if key in values and values[key] is None and key not in may_be_null:
            yield f"{key} is None"
