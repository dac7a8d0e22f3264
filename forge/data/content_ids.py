"""Content ids: name the tokenizer and the tokens of a config before they are built."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from forge.core import optimizers, project_plugins
from forge.core.config import Config, Ids, ResolvedConfig, checked
from forge.core.errors import ConfigError, DataError
from forge.core.files import (
    canonical,
    digest_bytes,
    digest_file,
    disk_trouble,
    read_object_or_empty,
    short_id,
)
from forge.core.models import architectures
from forge.core.paths import MANIFEST, RunPaths, inputs_folder, tokenizer_folder, tokens_folder
from forge.core.terminal import say, say_once
from forge.core.text_formats import TOKEN_FORMATS, new_readings
from forge.core.tokenize_settings import UNNAMED, Tokenize
from forge.data import corpus, model
from forge.data.corpus import INPUTS, of_key
from forge.data.end_token import FILES, TOKENIZER_CONFIG, token_not_guessed
from forge.data.inputs import list_inputs, named_inputs, of_hub

# Incremented when the same settings and inputs give other bytes, so that nothing old is reused.
TOKENIZER_FORMAT = 1
TOKENS_FORMAT = 1

READING = ("format", "text_field", "document_separator", "invalid_utf8")
SOURCES_FORMAT = 1


def resolve(config: Config) -> ResolvedConfig:
    """The config with its ids filled in, and what model.init gives; existing ids are kept.

    Called once, at the start of a command or of the workflow. Raises as `resolve_ids`, and as
    `model.with_pretrained`. A run whose inputs are gone keeps its ids while what was made from them is
    there.
    """
    for folder in config.literal_folders:
        say_once(
            f"note: {folder!r} is a directory of this name here, made by an earlier version; move it, and"
            " the path is expanded"
        )
    config = model.with_pretrained(config)
    if not config.ids:  # the config of a tokenizer or tokens has no train
        _check_windows(config)
    try:
        ids = config.ids or resolve_ids(config)
    except (ConfigError, DataError) as err:
        kept = _ids_of_run(config)
        if kept is None:
            raise
        ids = kept
        say(f"{config.run} goes on with the data that it has: {err.what}")
    if not config.ids:
        used = used_plugins(config)
        of_plugins = {"plugins": used, "plugins_before": _plugins_before(config, used)}
        ids = ids.model_copy(update=of_plugins)
    resolved = ResolvedConfig.model_validate({**config.to_json(), "ids": ids})
    if not config.ids and ids.tokenizer:
        model.check_tokenizer(resolved)
    return resolved


def _check_windows(config: Config) -> None:
    """ConfigError where conversations would be packed into other windows than those of training."""
    for one in config.tokenize.corpora.values():
        if one.seq_len not in (None, config.train.seq_len):
            raise ConfigError(
                f"run {config.run}: conversations are packed into windows of {one.seq_len} tokens, and"
                f" train.seq_len is {config.train.seq_len}",
                fix="give seq_len beside their inputs the value of train.seq_len",
            )


def used_plugins(config: Config) -> dict[str, str]:
    """Name -> digest of the project's plugins that a run cannot be trained without."""
    names = {architectures.plugin_of(config.model), optimizers.plugin_of(config.train.optimizer)}
    return {name: project_plugins.used()[name] for name in sorted(filter(None, names))}


def _plugins_before(config: Config, used: dict[str, str]) -> dict[str, list[str]]:
    """Digests that these plugins had when the run was started before, by its config.json, and with which
    its checkpoints may have been made. Said where this start is the first with another one."""
    path = RunPaths.of(config).config
    recorded = read_object_or_empty(path).get("ids")
    known = recorded if isinstance(recorded, dict) else {}
    of_plugins = {key: known[key] for key in ("plugins", "plugins_before") if key in known}
    then = checked(Ids, of_plugins, f"{path}, ids")
    found = {}
    for name, digest in used.items():
        before = then.plugins_before.get(name, [])
        last = then.plugins.get(name, digest)
        if last != digest and project_plugins.may_change(name):
            say_once(
                f"note: {config.run} goes on with the plugin {name} as it was edited: its digest is"
                f" {digest[:12]}, and was {last[:12]} (plugins_may_change)"
            )
            before = [*before, last]
        found[name] = [one for one in dict.fromkeys(before) if one != digest]
    return {name: before for name, before in found.items() if before}


def resolve_ids(config: Config) -> Ids:
    """Ids of the tokenizer, the tokens, the corpus files of a hub and the pretrained weights, or of the
    inputs of a program.

    They depend on settings, names and sizes of the inputs, not on contents: this runs at every start of
    the workflow. Files that rules make count by name. What is on a hub counts as the config spells it:
    the first download decides on the commit of a branch. Raises DataError (inputs) and ConfigError
    (tokenizer.path, URL of a hub).
    """
    inputs = _id_of_inputs(config)
    if config.program:
        return Ids(inputs=inputs)
    tokenizer = short_id(tokenizer_recipe(config))
    tokens = {
        name: short_id(_tokens_recipe(settings, tokenizer, config.own_folders, name))
        for name, settings in config.tokenize.corpora.items()
    }
    weights = short_id(model.recipe(config)) if config.model.init else ""
    if config.tokenize.sources is None:
        return Ids(tokenizer=tokenizer, tokens=tokens[""], inputs=inputs, model=weights)
    listed = short_id({"format": SOURCES_FORMAT, "sources": tokens})
    return Ids(tokenizer=tokenizer, tokens=listed, sources=tokens, model=weights)


def _ids_of_run(config: Config) -> Ids | None:
    """The ids in the run's config.json, where its inputs are named alike and no longer needed: there are
    the tokens that were made from them, or a program has ended. Else None."""
    paths = RunPaths.of(config)
    recorded = read_object_or_empty(paths.config)
    if "ids" not in recorded or _naming(recorded) != _naming(config.to_json()):
        return None
    ids = checked(Ids, recorded["ids"], f"{paths.config}, ids")
    folders = [inputs_folder(config.data, ids.inputs)] if ids.inputs else []
    if ids.tokens:
        tokens = [ids.tokens, *ids.sources.values()]
        folders += [tokens_folder(config.data, one) for one in tokens]
        folders.append(tokenizer_folder(config.data, ids.tokenizer))
    elif not paths.trained.exists():
        return None  # the inputs themselves are read until the run is at its goal
    return ids if all((folder / MANIFEST).exists() for folder in folders) else None


def _naming(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of a config that name its data: `tokenize` without UNNAMED."""
    keys = {key: config.get(key) for key in ("data", "program", "tokenizer", "tokenize", "model")}
    tokenize = keys["tokenize"]
    if isinstance(tokenize, dict):
        keys["tokenize"] = {name: value for name, value in tokenize.items() if name not in UNNAMED}
    return keys


def corpus_config(config: ResolvedConfig, name: str) -> ResolvedConfig:
    """The config that tokenizes one source alone, with the id that its tokens have in `config`."""
    train = config.train.model_copy(update={"mix": None})
    alone = {"tokenize": config.tokenize.corpora[name], "train": train}
    single = config.model_copy(update=alone)
    ids = Ids(
        tokenizer=config.ids.tokenizer,
        tokens=config.ids.sources[name],
        inputs=_id_of_inputs(single),
    )
    return single.model_copy(update={"ids": ids})


def single_corpora(config: ResolvedConfig) -> list[ResolvedConfig]:
    """A config for each source alone; the config itself where it has one corpus."""
    return [corpus_config(config, name) for name in config.ids.sources] or [config]


def require_current(config: ResolvedConfig, key: str) -> None:
    """DataError where the id `key` (`tokenizer`, `model`, or `tokens` of a single corpus) is not the one
    of the current inputs.

    Else other data would be stored under the id that the config was resolved to.
    """
    then = getattr(config.ids, key)
    if key == "tokenizer":
        now = short_id(tokenizer_recipe(config))
    elif key == "model":
        now = short_id(model.recipe(config))
    else:
        now = short_id(_tokens_recipe(config.tokenize, config.ids.tokenizer, config.own_folders))
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
            read = {
                name: _reading(corpus, config.own_folders, name)
                for name, corpus in config.tokenize.corpora.items()
            }
            recipe |= read[""] if config.tokenize.sources is None else {"sources": read}
        case "path":
            path, beside = tokenizer_files(str(settings.path))
            digested = [path, *(file for file in beside if file.name == TOKENIZER_CONFIG)]
            recipe["files"] = {file.name: digest_file(file) for file in digested}
            # In the id only where earlier versions guessed another token.
            if not settings.eos_token and (token := _token_not_guessed(path, beside)):
                recipe["named_eos_token"] = token
        case "hub":
            recipe["hub"] = settings.hub
    return recipe


def tokenizer_files(path: str) -> tuple[Path, list[Path]]:
    """The file that `tokenizer.path` names, and those beside it that may name its end-of-text token."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(
            f"tokenizer.path is {path!r}: there is no such file",
            fix="give the path of a tokenizer.json, relative to the working directory",
        )
    beside = [file.with_name(name) for name in FILES]
    return file, [other for other in beside if other.is_file()]


def _token_not_guessed(path: Path, beside: list[Path]) -> str | None:
    with disk_trouble(path, "read"):
        return token_not_guessed(path, beside)


def tokens_settings(settings: Tokenize) -> dict[str, Any]:
    """The settings that determine the shards of a corpus. Without `inputs`: their files are listed
    instead. Without UNNAMED, which change no ids."""
    unused = () if settings.format in TOKEN_FORMATS else ("token_dtype",)
    return settings.model_dump(mode="json", exclude={"inputs", *UNNAMED, *unused})


def _tokens_recipe(
    settings: Tokenize, tokenizer: str, own: str, source: str = ""
) -> dict[str, Any]:
    return {
        "format": TOKENS_FORMAT,
        "tokenizer": tokenizer,
        "settings": tokens_settings(settings),
        "listing": _listing_digest(settings, own, source),
    }


def _reading(settings: Tokenize, own: str, source: str) -> dict[str, Any]:
    """The settings of one corpus on which a trained tokenizer depends."""
    listing = _listing_digest(settings, own, source)
    return {**settings.model_dump(include=set(READING)), "listing": listing}


def _listing_digest(settings: Tokenize, own: str, source: str) -> str:
    """own: as for `corpus.list_named`. source: the name of the corpus in tokenize.sources, for errors; ""
    for tokenize.inputs."""
    try:
        return _cached_listing_digest(tuple(settings.inputs), settings.format, own, str(Path.cwd()))
    except DataError as err:
        raise of_key(err, f"tokenize.sources.{source}.inputs" if source else INPUTS) from None


@functools.cache
def _cached_listing_digest(inputs: tuple[str, ...], kind: str, own: str, _cwd: str) -> str:
    """Cached for sweeps of hundreds of runs, by working directory, on which relative inputs depend.

    kind: tokenize.format. What earlier versions read otherwise counts with a word for how it is read.
    """
    listed: list[Any] = [
        (file.name, file.size, *new_readings(file.name, kind))
        for file in corpus.list_texts(corpus.local_inputs(inputs), kind, own)
    ]
    # By name: the files that rules make and those of a hub may not be there yet.
    for name in sorted(corpus.made_by_rules(inputs)) + _named_of_hub(inputs, INPUTS):
        marks = new_readings(name, kind)
        listed.append([name, *marks] if marks else name)
    return digest_bytes(canonical(listed))


def _id_of_inputs(config: Config) -> str:
    names, key = named_inputs(config)
    return _inputs_id(tuple(names), key, config.own_folders, str(Path.cwd()))


@functools.cache
def _inputs_id(inputs: tuple[str, ...], key: str, own: str, _cwd: str) -> str:
    """Id of the names and sizes of the inputs, cached as `_cached_listing_digest`; "" without inputs."""
    files = [(file.name, file.size) for file in list_inputs(inputs, own)]
    remote = _named_of_hub(inputs, key)
    return short_id(files + remote) if files or remote else ""


def _named_of_hub(inputs: tuple[str, ...], key: str) -> list[Any]:
    return sorted(f"{named.repo}/{named.pattern}" for named in of_hub(inputs, key))
