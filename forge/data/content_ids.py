"""Content ids: name the tokenizer and the tokens of a config before they are built."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from forge.core.config import Config, Ids, ResolvedConfig, Tokenize
from forge.core.errors import ConfigError, DataError
from forge.core.files import canonical, digest_bytes, digest_file, short_id
from forge.data import corpus, model
from forge.data.inputs import list_inputs, of_hub

# Incremented when the same settings and inputs give other bytes, so that nothing old is reused.
TOKENIZER_FORMAT = 1
TOKENS_FORMAT = 1

READING = ("format", "text_field", "document_separator", "invalid_utf8")


def resolve(config: Config) -> ResolvedConfig:
    """The config with its ids filled in, and what model.init gives; existing ids are kept.

    Called once, at the start of a command or of the workflow. Raises as `resolve_ids`, and as
    `model.with_pretrained`.
    """
    config = model.with_pretrained(config)
    ids = config.ids or resolve_ids(config)
    resolved = ResolvedConfig.model_validate({**config.to_json(), "ids": ids})
    if not config.ids and not config.program:
        model.check_tokenizer(resolved)
    return resolved


def resolve_ids(config: Config) -> Ids:
    """Ids of the tokenizer, the tokens and the pretrained weights, or of the inputs of a program.

    They depend on settings, names and sizes of the inputs, not on contents: this runs at every start of
    the workflow. Raises DataError (inputs) and ConfigError (tokenizer.path).
    """
    if config.program:
        return Ids(inputs=_inputs_id(tuple(config.program.inputs), str(Path.cwd())))
    tokenizer = short_id(tokenizer_recipe(config))
    tokens = short_id(_tokens_recipe(config, tokenizer))
    weights = short_id(model.recipe(config)) if config.model.init else ""
    return Ids(tokenizer=tokenizer, tokens=tokens, model=weights)


def require_current(config: ResolvedConfig, key: str) -> None:
    """DataError where the id `key` (`tokenizer`, `tokens`, `model`) is not that of the current inputs.

    Else other data would be stored under the id that the config was resolved to.
    """
    then, now = getattr(config.ids, key), getattr(resolve_ids(config), key)
    if then != now:
        raise DataError(
            f"the config was resolved to {key} {then}, but its inputs now give {now}",
            cause="input files were added, removed or changed in size, "
            "or this machine has another Python",
            fix="restore the inputs, or start again from the config file, which has no ids",
        )


def tokenizer_recipe(config: Config) -> dict[str, Any]:
    """The settings and inputs that determine the tokenizer, for its source."""
    settings = config.tokenizer
    recipe: dict[str, Any] = {
        "format": TOKENIZER_FORMAT,
        "source": settings.source,
        "eos_token": settings.eos_token,
    }
    match settings.source:
        case "train":
            recipe |= settings.model_dump(include={"vocab_size", "sample_mib"})
            recipe |= config.tokenize.model_dump(include=set(READING))
            recipe["listing"] = _listing_digest(config.tokenize)
        case "path":
            recipe["files"] = {
                path.name: digest_file(path) for path in tokenizer_files(str(settings.path))
            }
        case "hub":
            recipe["hub"] = settings.hub
    return recipe


def tokenizer_files(path: str) -> list[Path]:
    """The file that `tokenizer.path` names, and tokenizer_config.json if its directory has one."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(
            f"tokenizer.path is {path!r}: there is no such file",
            fix="give the path of a tokenizer.json, relative to the working directory",
        )
    beside = file.with_name("tokenizer_config.json")
    return [file, beside] if beside.is_file() else [file]


def tokens_settings(settings: Tokenize) -> dict[str, Any]:
    """The settings that determine the shards. Without `inputs`: their files are listed instead."""
    return settings.model_dump(mode="json", exclude={"inputs"})


def _tokens_recipe(config: Config, tokenizer: str) -> dict[str, Any]:
    return {
        "format": TOKENS_FORMAT,
        "tokenizer": tokenizer,
        "settings": tokens_settings(config.tokenize),
        "listing": _listing_digest(config.tokenize),
    }


def _listing_digest(settings: Tokenize) -> str:
    return _cached_listing_digest(tuple(settings.inputs), str(Path.cwd()))


@functools.cache
def _cached_listing_digest(inputs: tuple[str, ...], _cwd: str) -> str:
    """Cached for sweeps of hundreds of runs, by working directory, on which relative inputs depend."""
    files = corpus.list_files(Tokenize(inputs=list(inputs)))
    return digest_bytes(canonical([(file.name, file.size) for file in files]))


@functools.cache
def _inputs_id(inputs: tuple[str, ...], _cwd: str) -> str:
    """As `_cached_listing_digest`; "" for a program without inputs."""
    files = [(file.name, file.size) for file in list_inputs(inputs)]
    remote = sorted(f"{named.repo}/{named.pattern}" for named in of_hub(inputs))
    return short_id(files + remote) if files or remote else ""
