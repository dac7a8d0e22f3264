"""Trusted config of a run whose directory a user names: the project's config of that run.

The files in that directory may come from somebody else. Commands, modules, addresses and paths are taken
from config/config.yaml and the sample sheet of the project in the current directory, or from the file
that --config names, and never from beside the results.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.checkpoint.directory import refuse_link
from forge.checkpoint.family import with_steps
from forge.checkpoint.resume import is_checkpoint
from forge.core import hooks
from forge.core.config import (
    CONFIG,
    FOLDERS,
    OUTSIDE_TRAINING,
    Config,
    ResolvedConfig,
    apply_overrides,
    as_recorded,
    checked,
    read_values,
    use_plugins,
)
from forge.core.errors import ForgeError
from forge.core.files import read_object_or_empty
from forge.core.paths import SHEET, RunPaths
from forge.core.records import RunSettings
from forge.core.sample_sheet import run_configs
from forge.core.terminal import say
from forge.core.values import shown
from forge.data.model import with_pretrained
from forge.reporting.find_runs import project_folder

# What a run's own config.json never decides, since it is executed or opened. Nor sections of plugins,
# which it should not have: they hold modules and addresses.
OF_THE_USER = ("program.validate", "program.source", "program.inputs")


@dataclass(frozen=True)
class Trusted:
    """The config by which a command may work on a run. is_ours: it is the project's, or --config has
    named it; else it is that of the run without what would be executed or opened."""

    config: ResolvedConfig
    is_ours: bool


def directory_of(named: str) -> RunPaths | None:
    """The directory of a run or of a checkpoint that a user names, by itself or by the config.json in it;
    None for any other file, which is a config of the user's own."""
    path = Path(named)
    if path.is_dir():
        return RunPaths(path)
    is_of_a_run = path.is_file() and path.name == RunPaths(path.parent).config.name
    return RunPaths(path.parent) if is_of_a_run else None


def run_of(place: RunPaths) -> RunPaths:
    """The run of a checkpoint in its `checkpoints/` or `merged/`; any other directory as it is."""
    folder = place.root.resolve()
    run = RunPaths.of_checkpoint(folder) or RunPaths.of_merged(folder)
    return run if run and is_checkpoint(folder) else place


def is_of_program(run: RunPaths) -> bool:
    """Return whether this is a run of another training program. A checkpoint of Forge's own trainer is
    none, whatever its directory has."""
    return not is_checkpoint(run.root) and bool(read_object_or_empty(run.config).get("program"))


def trusted(
    run: RunPaths,
    file: str | None,
    overrides: dict[str, Any],
    *needed: str,
    writes: bool = True,
) -> Trusted:
    """The config by which a command may work on a run, at the directory that the user has named. Says in
    one line what is not used of a run that is not the project's.

    file: of --config. needed: keys or sections that the command needs. writes: whether it writes beside
    the results. Raises ConfigError, and DataError where it would write through a link.
    """
    own = as_recorded(read_object_or_empty(run.config))
    of_project, why = _of_project(run, own)
    if writes and of_project is None:
        _refuse_links(run)
    known = _of_file(file, run) if file else of_project
    values = known.to_json() if known else _without(own, (*OF_THE_USER, *hooks.sections(), "data"))
    if known is None:
        values["data"] = project_folder("data")
        _say_what_is_not_used(run, why, [*_unused(own, values, overrides, needed)])
    values = {**values, "ids": values.get("ids") or own.get("ids") or {}}
    config = checked(ResolvedConfig, apply_overrides(values, overrides), str(run.config))
    place = {"run": _name(run), "results": str(run.root.absolute().parent)}
    return Trusted(config.model_copy(update=place), known is not None)


def sections_of_plugins(run: RunPaths, file: str | None, *needed: str) -> Config:
    """The config that the user has of a run, for sections of plugins: the config of --config or of the
    project, or one with defaults. Nothing of the run itself is read, so none of its plugins is needed.
    Otherwise as `trusted`, for a command that writes beside the results."""
    own = as_recorded(read_object_or_empty(run.config))
    of_project, why = _of_project(run, own)
    if of_project is None:
        _refuse_links(run)
    known = _of_file(file, run) if file else of_project
    if known is None:
        _say_what_is_not_used(run, why, [*_unused(own, {}, {}, needed)])
    return known or Config()


def trusted_data(run: RunPaths, file: str | None, *, writes: bool = False) -> str:
    """The directory with tokenizers and tokens: of --config, else of the project. For runs of Forge's own
    trainer, whose checkpoints have a config. writes: whether the command writes beside them."""
    if writes and _of_project(run, as_recorded(read_object_or_empty(run.config)))[0] is None:
        _refuse_links(run)
    return _of_file(file, run).data if file else project_folder("data")


def project_runs() -> tuple[dict[str, Config], str]:
    """The configs of all rows of the project's sample sheet, and its path. Raises ConfigError."""
    values, sheet = _base(CONFIG)
    return with_steps(run_configs(values, str(sheet))), str(sheet)


def training_settings(named: str, config: ResolvedConfig, overrides: dict[str, Any]) -> RunSettings:
    """Sections of plugins for training by the config that a user names: those of that
    config, and for a run's config.json, which has none, of the project's."""
    if run := directory_of(named):
        config = trusted(run, None, overrides, *hooks.sections(), writes=False).config
    return RunSettings(**config.of_plugins)


# --- the config of the project --------------------------------------------------------------------


def _base(file: str) -> tuple[dict[str, Any], str | None]:
    """The values in a config file, and its sample sheet, if it has one."""
    values = read_values(file)
    default = SHEET if Path(file).resolve() == Path(CONFIG).resolve() else None
    sheet = values.pop("runs", default)
    use_plugins(values)
    return values, None if sheet is None else str(sheet)


def _of_file(file: str, run: RunPaths) -> Config:
    """The config that --config names: the run's row of its sheet where there is one."""
    values, sheet = _base(file)
    rows = run_configs(values, sheet) if sheet else {}
    return with_pretrained(rows.get(_name(run)) or checked(Config, values, file))


def _name(run: RunPaths) -> str:
    return run.root.absolute().name


def _of_project(run: RunPaths, own: dict[str, Any]) -> tuple[Config | None, str]:
    """The config of the project's run in this directory; None, and why, where it has none."""
    if not Path(CONFIG).is_file():
        return None, f"there is no {CONFIG} here"
    name = _name(run)
    try:
        values, sheet = _base(CONFIG)
        rows = run_configs(values, str(sheet))
        if name not in rows or RunPaths.of(rows[name]).root.resolve() != run.root.resolve():
            return None, f"it is not a run of {sheet}"
        config = with_pretrained(with_steps(rows)[name])
    except ForgeError as err:
        return None, err.what
    if key := next(_differences(_of_training(config.to_json()), _of_training(own)), ""):
        return None, f"{sheet} has another {key} for it than its config.json"
    return config, ""


def _of_training(values: dict[str, Any]) -> dict[str, Any]:
    """The values in the config digest, without the ids, which name files and nothing to execute."""
    left_out = (*FOLDERS, *OUTSIDE_TRAINING, *hooks.sections(), "ids")
    return {k: v for k, v in values.items() if k not in left_out}


def _differences(one: Any, other: Any, key: str = "") -> Iterator[str]:
    """Dotted keys in which two configs differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in sorted(one.keys() | other.keys()):
            yield from _differences(one.get(name), other.get(name), f"{key}.{name}".lstrip("."))
    elif one != other:
        yield key


# --- a run of somebody else -----------------------------------------------------------------------


def _without(values: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    """A copy without these dotted keys."""
    dotted = [key.partition(".") for key in keys]
    left = {k: v for k, v in values.items() if (k, "", "") not in dotted}
    for section, _, key in dotted:
        if key and isinstance(left.get(section), dict):
            left[section] = {k: v for k, v in left[section].items() if k != key}
    return left


def _unused(
    own: dict[str, Any], used: dict[str, Any], overrides: dict[str, Any], needed: tuple[str, ...]
) -> Iterator[str]:
    """Keys beside the run that the command needs and does not use: no option or trusted config has
    them."""
    for key in needed:
        section, _, name = key.partition(".")
        value = own.get(section)
        value = value.get(name) if name and isinstance(value, dict) else value
        if any(f"{given}.".startswith(f"{key}.") for given in overrides):
            continue
        if section in (*OUTSIDE_TRAINING, *hooks.sections()):  # a config.json never has them
            yield key
        elif value and value != used.get(key):
            yield f"{key} {shown(value)}"


def _say_what_is_not_used(run: RunPaths, why: str, keys: list[str]) -> None:
    if keys:
        say(
            f"note: not used of {run.root}: {', '.join(keys)}; {why}, and a directory of results decides"
            " nothing that is executed, contacted or opened (--config FILE names a config to use)"
        )


def _refuse_links(run: RunPaths) -> None:
    """DataError for a link by which a command would write outside of the run's directory."""
    for path in run.extended:
        refuse_link(path)
