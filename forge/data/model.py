"""`forge model`: the pretrained weights that a run starts from (`model.init`), found or downloaded.

Their config.json gives the shape of the model when a config is resolved. The weights stay where they
are; `data/models/{id}/manifest.json` has their digests.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from forge.core.config import Config, ResolvedConfig, checked
from forge.core.errors import ConfigError, DataError, UnfitError
from forge.core.file_list import FileList, described, verify
from forge.core.files import (
    PlainName,
    canonical,
    digest_bytes,
    disk_trouble,
    plain_name,
    read_json,
)
from forge.core.models.architectures import model_keys
from forge.core.models.base import InitSettings, Model
from forge.core.paths import MANIFEST, TOKENIZER, model_folder, tokenizer_folder
from forge.core.process import hostname
from forge.core.records import Record
from forge.core.terminal import progress, say
from forge.data import hub
from forge.data.shards import InputEntry

FORMAT = 1  # of the id
OF_THE_USER = ("init", "dropout")  # keys of `model` that weights do not give
HF_CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
# Files by which transformers makes another model than that of WEIGHTS or INDEX beside them: an adapter of
# PEFT, where that is installed, and weights of `distributed/checkpoint.py`.
OTHER_WEIGHTS = (ADAPTER, "shard-[0-9]*-model-[0-9]*-of-[0-9]*.safetensors")


class WeightsEntry(InputEntry):
    """A file of weights: name in the directory that the manifest names, bytes, blake3."""

    name: PlainName


class ModelManifest(Record):
    """manifest.json in `data/models/{id}`: the files of pretrained weights."""

    FIX: ClassVar[str] = "remove it and run `forge model CONFIG`"

    id: str
    source: str
    """`hub:owner/name@revision`, or the directory of model.init.path."""
    commit: str
    """Commit of the repository on the hub; "" for a directory."""
    folder: str
    """Absolute path of the directory that has the files."""
    files: list[WeightsEntry]
    digest: str
    """blake3 of names, sizes and digests of all files."""
    config: dict[str, Any]
    """The config.json of the weights."""

    @property
    def paths(self) -> list[Path]:
        return [Path(self.folder) / entry.name for entry in self.files]

    @property
    def file_list(self) -> FileList:
        """The files, which may be links: of a hub they are in its cache."""
        return FileList(
            Path(self.folder),
            {file.name: file.entry for file in self.files},
            listed_in=f"the manifest of model {self.id}",
            fix=f"restore it, or remove data/models/{self.id}/{MANIFEST} to use it as it is",
            follow_links=True,
        )

    def verify(self, share: tuple[int, int] = (0, 1)) -> None:
        """Verify digests. share: as for `file_list.verify`.

        Raises UnfitError where this host does not see a file, DataError where one has changed.
        """
        for path in self.paths:
            if not path.is_file():
                raise UnfitError(
                    f"{hostname()} does not see {path}, which the run starts from",
                    cause="removed, or not on a file system that all nodes share (HF_HOME?)",
                    fix="bring it back, or have it where nodes see it, remove"
                    f" data/models/{self.id}/{MANIFEST} and rerun",
                )
        verify([self.file_list], share)


# --- when a config is resolved --------------------------------------------------------------------


def with_pretrained(config: Config) -> Config:
    """The config with the shape and, unless its own is given, the tokenizer of model.init.

    As it is without model.init, and with ids: a resolved config has both. Raises ConfigError for what
    does not fit, DataError for a corrupt config.json, and what `hub.download` raises.
    """
    init = config.model.init
    if init is None or config.ids:
        return config
    keys = model_keys(config_of(init), config.train.seq_len, f"{init.name}/{HF_CONFIG}")
    _refuse_other_shape(config.model, keys, init)
    values = config.to_json()
    values["model"] = {key: values["model"][key] for key in OF_THE_USER} | keys
    if "source" not in config.tokenizer.model_fields_set:
        values["tokenizer"] |= {"source": "hub", "hub": init.hub} if init.hub else _tokenizer(init)
    filled: Config = checked(Config, values, init.name)
    _look_at_tokenizer(filled, init)
    return filled


def recipe(config: Config) -> dict[str, Any]:
    """Recipe of the id of the weights: their shape, and the repository, or the directory with names
    and sizes of its files.

    Not without the directory: models that were tuned from the same one have files of equal sizes.
    """
    init = config.model.init
    assert init
    values = {
        "format": FORMAT,
        "model": config.model.model_dump(mode="json", exclude={*OF_THE_USER, "architecture"}),
    }
    if init.hub:
        return {**values, "hub": init.hub}
    folder = str(Path(str(init.path)).resolve())
    files = [(path.name, path.stat().st_size) for path in _local_files(folder)]
    return {**values, "folder": folder, "files": files}


def config_of(init: InitSettings) -> dict[str, Any]:
    """The config.json of pretrained weights."""
    return _cached_config(init, str(Path.cwd()))


@functools.cache
def _cached_config(init: InitSettings, _cwd: str) -> dict[str, Any]:
    """Cached for sweeps of hundreds of runs, by working directory, on which a path depends."""
    path = hub.download(_repo(init), HF_CONFIG) if init.hub else Path(str(init.path)) / HF_CONFIG
    if path is None or not path.is_file():
        raise ConfigError(
            f"model.init: {init.name} has no {HF_CONFIG}",
            cause="not the weights of a model, or in another format",
            fix="name a repository or a directory as transformers' save_pretrained writes it",
        )
    values = read_json(path)
    if not isinstance(values, dict):
        raise DataError(f"{path} is not a JSON object", fix="name another model in model.init")
    return values


def _repo(init: InitSettings) -> hub.Repo:
    name, revision = str(init.hub).split("@", 1)
    return hub.Repo(name, revision, key="model.init.hub", command="forge model CONFIG")


def _refuse_other_shape(model: Model, keys: dict[str, Any], init: InitSettings) -> None:
    given = model.model_dump(mode="json", include=model.model_fields_set - {*OF_THE_USER})
    wrong = [
        f"model.{key} is {value!r}, the weights have {keys.get(key)!r}"
        for key, value in given.items()
        if value is not None and value != keys.get(key)
    ]
    if wrong:
        raise ConfigError(
            f"the config does not fit {init.name}: {'; '.join(wrong)}",
            cause="with model.init the weights give the shape of the model",
            fix="remove these keys",
        )


def _tokenizer(init: InitSettings) -> dict[str, Any]:
    path = Path(str(init.path)) / TOKENIZER
    if not path.is_file():
        raise ConfigError(
            f"model.init.path is {str(init.path)!r}, which has no {TOKENIZER}",
            cause="its tokenizer exists only in another format, or was not saved with the weights",
            fix="put it there, or set tokenizer.source",
        )
    return {"source": "path", "path": str(path)}


def _look_at_tokenizer(config: Config, init: InitSettings) -> None:
    """A warning where the tokenizer is not that of the weights; ConfigError where it cannot fit."""
    tokenizer = config.tokenizer
    if tokenizer.source == "train":
        refuse_ids_beyond(config.model, tokenizer.vocab_size)
    beside = init.path and Path(init.path) / TOKENIZER
    is_its_own = tokenizer.source == "hub" and tokenizer.hub == init.hub
    if tokenizer.source == "path" and beside and beside.is_file():
        path = Path(str(tokenizer.path))
        is_its_own = path.is_file() and path.read_bytes() == beside.read_bytes()
    if not is_its_own:
        say(
            f"warning: run {config.run}: the tokenizer (tokenizer.source {tokenizer.source}) is not that"
            f" of {init.name}: its ids have other meanings than those that the weights were trained on"
        )


def refuse_ids_beyond(model: Model, num_ids: int) -> None:
    """ConfigError where a tokenizer has more ids than the embedding has rows."""
    if num_ids > model.num_rows(num_ids):
        raise ConfigError(
            f"the tokenizer has {num_ids} ids, the embedding {model.vocab_size} rows"
            " (model.vocab_size)",
            cause="the tokenizer is not that of the weights, or model.vocab_size is too small",
            fix="choose another tokenizer"
            + ("" if model.init else ", or remove model.vocab_size: then both are equal"),
        )


def check_tokenizer(config: ResolvedConfig) -> None:
    """`refuse_ids_beyond` for the tokenizer of a run, where it is built. Before ranks are started."""
    path = tokenizer_folder(config.data, config.ids.tokenizer) / MANIFEST
    if config.model.vocab_size and path.exists():
        refuse_ids_beyond(config.model, int(read_json(path)["vocab_size"]))


# --- `forge model` --------------------------------------------------------------------------------


def find_files(config: ResolvedConfig) -> tuple[Path, list[Path], str]:
    """Directory, safetensors files and commit of the weights of a config, downloaded where needed.

    Raises ConfigError where there are none, and what `hub.download` raises.
    """
    init = config.model.init
    assert init
    if init.hub:
        return _download(init, model_folder(config.data, config.ids.model).absolute())
    folder = Path(str(init.path))
    files = _local_files(str(folder))
    if (folder / WEIGHTS).is_file() and (folder / INDEX).is_file():
        say(f"model: {folder} has {WEIGHTS} and {INDEX}: the former is read, as transformers does")
    return folder.absolute(), files, ""


def is_made(config: ResolvedConfig) -> bool:
    """Return whether the manifest of the weights is there, and every file that it lists, with its
    size."""
    path = model_folder(config.data, config.ids.model) / MANIFEST
    return path.exists() and not any(ModelManifest.read(path).file_list.bad_files(content=False))


def write_manifest(
    config: ResolvedConfig, folder: Path, files: Sequence[Path], commit: str
) -> Path:
    """Digest the files of the weights and write their manifest; its path."""
    init, path = config.model.init, model_folder(config.data, config.ids.model) / MANIFEST
    assert init
    total, done, entries = sum(file.stat().st_size for file in files), 0, []
    with progress("model", total / 2**20, "MiB") as report:
        for name, size, digest in described(folder, [file.name for file in files]):
            entries.append(WeightsEntry(name=name, size=size, digest=digest))
            done += size
            report(done / 2**20, name)
    ModelManifest(
        id=config.ids.model,
        source=init.name,
        commit=commit,
        folder=str(folder),
        files=entries,
        digest=digest_bytes(canonical([entry.model_dump() for entry in entries])),
        config=config_of(init),
    ).write(path)
    say(f"model {config.ids.model}: {init.name}, {len(files)} files, {total / 2**20:,.1f} MiB")
    return path


def _local_files(folder: str) -> list[Path]:
    for pattern in OTHER_WEIGHTS:
        for path in Path(folder).glob(pattern):
            raise _other_weights(f"model.init.path is {folder!r}", path.name)
    index = Path(folder) / INDEX
    is_single = (Path(folder) / WEIGHTS).is_file() or not index.is_file()
    names = [WEIGHTS] if is_single else _names_in(index)
    files = [Path(folder) / name for name in names]
    for file in files:
        if not file.is_file():
            raise ConfigError(
                f"model.init.path is {folder!r}, which has no {file.name}",
                cause="an incomplete copy, or weights in another format than safetensors",
                fix="name a directory as transformers' save_pretrained writes it",
            )
    return files


def _other_weights(where: str, name: str) -> ConfigError:
    return ConfigError(
        f"{where}, which has {name}",
        cause="an adapter, which transformers applies to the weights, or weights in parts",
        fix="merge it (PEFT: merge_and_unload) and save_pretrained into a directory of its own",
    )


def _names_in(index: Path) -> list[str]:
    """The files that an index names. DataError where the file is not such an index."""
    values = read_json(index)
    places = values.get("weight_map") if isinstance(values, dict) else None
    names = list(places.values()) if isinstance(places, dict) else []
    if not names or not all(isinstance(name, str) and _is_plain(name) for name in names):
        raise DataError(f"{index} lists no files in its weight_map: {json.dumps(names)[:100]}")
    return sorted(set(names))


def _is_plain(name: str) -> bool:
    try:
        return bool(plain_name(name))
    except ValueError:
        return False


def _download(init: InitSettings, target: Path) -> tuple[Path, list[Path], str]:
    """The files at one commit, in the hub's cache and by a link in `target`: never copied."""
    repo = _repo(init)
    config = hub.download(repo, HF_CONFIG)
    assert config  # read when the config was resolved
    commit = hub.commit_of(config, HF_CONFIG)
    repo = replace(repo, revision=commit)
    if _on_hub(repo, ADAPTER):
        raise _other_weights(f"model.init.hub is {init.hub}", ADAPTER)
    index = None if _on_hub(repo, WEIGHTS) else hub.download(repo, INDEX)
    files = []
    for name in _names_in(index) if index else [WEIGHTS]:
        cached = hub.download(repo, name)
        if cached is None:
            raise ConfigError(
                f"model.init.hub: {repo} has no {name}",
                cause="its weights exist only in another format (pytorch_model.bin, GGUF)",
                fix="choose a repository with safetensors files",
            )
        files.append(_linked(cached.resolve(), target / name))
    return target, files, commit


def _on_hub(repo: hub.Repo, name: str) -> bool:
    """Return whether a repository has a file, which is then downloaded.

    With HF_HUB_OFFLINE, what the cache does not have is not there, as for transformers: a cache that
    another program filled does not record which files are missing.
    """
    from huggingface_hub.constants import HF_HUB_OFFLINE

    try:
        return hub.download(repo, name) is not None
    except UnfitError:
        if not HF_HUB_OFFLINE:
            raise
        return False


def _linked(cached: Path, link: Path) -> Path:
    """A second name of the cached file, so that emptying the cache does not remove it; on another file
    system a symbolic link."""
    with disk_trouble(link):
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)  # of an interrupted command
        try:
            link.hardlink_to(cached)
        except OSError:
            link.symlink_to(cached)
    return link
