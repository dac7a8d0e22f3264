"""The table of architectures, and which of them a config or a config.json of Hugging Face is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import (
    Discriminator,
    SerializeAsAny,
    Tag,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import ErrorDetails

from forge.core import hooks
from forge.core.errors import ConfigError
from forge.core.models.base import Model
from forge.core.models.gpt2 import Gpt2
from forge.core.models.llama import Llama
from forge.core.terminal import say
from forge.core.values import shown

# model.architecture -> its keys. trainer/models/NAME_decoder.py has the layers.
ARCHITECTURES: dict[str, type[Model]] = {"llama": Llama, "gpt2": Gpt2}
DEFAULT = Llama()


def known() -> dict[str, type[Model]]:
    """All architectures, with those of the project's plugins."""
    return {**{name: model for name, (_, model) in hooks.architectures().items()}, **ARCHITECTURES}


def plugin_of(model: Model) -> str | None:
    """The plugin of the project that has the architecture; None for one of Forge."""
    of_plugins = {} if model.architecture in ARCHITECTURES else hooks.architectures()
    return of_plugins[model.architecture][0] if model.architecture in of_plugins else None


def _is_known(values: Any, read: ValidatorFunctionWrapHandler) -> Any:
    """Read the keys of an architecture. Pydantic's union has those of Forge alone: which others there
    are is known when a config is read."""
    name = _name_of(values)
    if name in [*ARCHITECTURES]:  # a list: the value may be one that cannot be hashed
        return read(values)
    models = known()
    if name not in [*models]:
        raise ValueError(f"architecture is {shown(name)}: must be one of {', '.join(models)}")
    try:
        return models[name].model_validate(values)
    except ValidationError as err:
        raise ValueError("; ".join(map(_problem, err.errors()))) from None


def _problem(detail: ErrorDetails) -> str:
    key, message = ".".join(map(str, detail["loc"])), detail["msg"].removeprefix("Value error, ")
    return f"{key} is {shown(detail['input'])}: {message}" if key else message


def _name_of(values: Any) -> Any:
    """The architecture of the values in a config, or of a Model."""
    if isinstance(values, dict):
        return values.get("architecture", DEFAULT.architecture)
    return getattr(values, "architecture", DEFAULT.architecture)


if TYPE_CHECKING:
    AnyModel = Model
else:
    AnyModel = SerializeAsAny[
        Annotated[
            Union[tuple(Annotated[model, Tag(name)] for name, model in ARCHITECTURES.items())],  # noqa: UP007
            Discriminator(_name_of),
            WrapValidator(_is_known),
        ]
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
    for name, model in known().items():
        if named in [[its_name] for its_name in model.HF_ARCHITECTURES]:
            return name, model
    all_known = ", ".join(
        its_name for model in known().values() for its_name in model.HF_ARCHITECTURES
    )
    raise ConfigError(
        f"{where} does not fit: architectures is {shown(named)}",
        cause=f"Forge's decoder can be {all_known}",
        fix="choose other weights; docs/huggingface.md lists what fits",
    )
