"""The table of architectures, and which of them a config or a config.json of Hugging Face is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import BeforeValidator, Discriminator, Tag

from forge.core.errors import ConfigError
from forge.core.models.base import Model
from forge.core.models.gpt2 import Gpt2
from forge.core.models.llama import Llama
from forge.core.terminal import say
from forge.core.values import shown

# model.architecture -> its keys. trainer/models/NAME_decoder.py has the layers.
ARCHITECTURES: dict[str, type[Model]] = {"llama": Llama, "gpt2": Gpt2}
DEFAULT = Llama()


def _is_known(values: Any) -> Any:
    name = _name_of(values)
    if name not in [*ARCHITECTURES]:  # a list: the value may be one that cannot be hashed
        raise ValueError(
            f"architecture is {shown(name)}: must be one of {', '.join(ARCHITECTURES)}"
        )
    return values


def _name_of(values: Any) -> Any:
    """The architecture of the values in a config, or of a Model."""
    if isinstance(values, dict):
        return values.get("architecture", DEFAULT.architecture)
    return getattr(values, "architecture", DEFAULT.architecture)


if TYPE_CHECKING:
    AnyModel = Model
else:
    AnyModel = Annotated[
        Union[tuple(Annotated[model, Tag(name)] for name, model in ARCHITECTURES.items())],  # noqa: UP007
        Discriminator(_name_of),
        BeforeValidator(_is_known),
    ]


def model_keys(values: dict[str, Any], seq_len: int, where: str) -> dict[str, Any]:
    """The keys of `model` that a config.json sets. where: its place, for errors.

    Says which of two contradicting values is taken. seq_len: train.seq_len. Raises ConfigError that names
    each key and value that does not fit.
    """
    name, model = _of_hf(values, where)
    if problems := list(model.hf_misfits(values, seq_len)):
        raise ConfigError(
            f"{where} does not fit: {'; '.join(problems)}",
            cause="Forge's decoder has nothing like it, and would train another model",
            fix="choose other weights; docs/huggingface.md lists what fits",
        )
    for choice in model.hf_choices(values):
        say(f"warning: {where}: {choice}")
    return {"architecture": name, **model.keys_of_hf(values)}


def _of_hf(values: dict[str, Any], where: str) -> tuple[str, type[Model]]:
    named = values.get("architectures")
    for name, model in ARCHITECTURES.items():
        if named in [[known] for known in model.HF_ARCHITECTURES]:
            return name, model
    all_known = ", ".join(
        known for model in ARCHITECTURES.values() for known in model.HF_ARCHITECTURES
    )
    raise ConfigError(
        f"{where} does not fit: architectures is {shown(named)}",
        cause=f"Forge's decoder can be {all_known}",
        fix="choose other weights; docs/huggingface.md lists what fits",
    )
