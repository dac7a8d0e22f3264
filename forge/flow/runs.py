"""Runs of a workflow command, by its config and sample sheet: which may start, and which have failed."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forge.checkpoint import family
from forge.core import hooks, project_plugins
from forge.core.config import (
    CONFIG,
    OF_FORGES_TRAINER,
    Config,
    ResolvedConfig,
    checked,
    read_values,
    use_plugins,
)
from forge.core.errors import ConfigError, TrainingError
from forge.core.files import (
    read_json,
)
from forge.core.paths import (
    SHEET,
    RunPaths,
)
from forge.core.sample_sheet import read_rows, run_configs, shared_folders
from forge.core.terminal import say
from forge.core.values import read_cell
from forge.data.content_ids import resolve
from forge.hosts.allocation import (
    OF_COMMAND,
    command_resources,
    run_layouts,
)
from forge.run import train
from forge.run.programs import program_of
from forge.slurm import adopt

# Names the file with the runs as they were submitted, for the Snakemake inside a job.
SUBMITTED = "FORGE_SUBMITTED"


def read_config(settings: Any, files: Sequence[str] = (CONFIG,)) -> dict[str, Any]:
    """config.yaml with what Snakemake's options --configfile and --config set in it.

    settings: Snakemake's ConfigSettings. files: read in place of config.yaml. Read by Forge and not by
    Snakemake's `configfile:`, which would read some values in another way than every other place (`010`
    as 8, YAML 1.1), and would read a file of 300 bytes for minutes. Without the keys of --config that are
    about the allocation. Raises ConfigError.
    """
    given = {name: value for name, value in _given(settings).items() if name not in OF_COMMAND}
    _refuse_misspelt(given)
    merged: dict[str, Any] = {}
    if settings.replace_workflow_config:
        files = ()
    # With --configfile there may be no config.yaml.
    files = [file for file in files if Path(file).exists() or not settings.configfiles]
    for values in (*map(read_values, [*files, *settings.configfiles]), given):
        if values.get("program"):  # config.yaml may be about Forge's own trainer
            of_trainer = [k for k, one in hooks.sections().items() if one.IS_OF_TRAINER]
            unused = (*OF_FORGES_TRAINER, *of_trainer)
            merged = {name: old for name, old in merged.items() if name not in unused}
        _merge(merged, values)
    return merged


def _given(settings: Any) -> dict[str, Any]:
    """The values of --config, read as values of all other places are: in those of Snakemake everything
    inside a section is text, `null` too (`snakemake.cli.parse_config`)."""
    given: dict[str, Any] = {}
    for word in settings.config_args or ():
        name, _, text = word.partition("=")
        value = read_cell(text)
        if isinstance(value, Mapping):
            _merge(given, {name: value})
        elif value is None or isinstance(value, bool):  # Snakemake knows True and False alone
            given[name] = value
    # A section in another form than JSON stays as Snakemake has read it.
    return {
        name: given.get(name, value) if _is_of_texts(value) else value
        for name, value in settings.config.items()
    }


def _is_of_texts(value: Any) -> bool:
    """Return whether all values of a section are texts: not so of a program that calls Snakemake."""
    if isinstance(value, Mapping):
        return all(map(_is_of_texts, value.values()))
    return all(map(_is_of_texts, value)) if isinstance(value, list) else isinstance(value, str)


def _refuse_misspelt(given: Mapping[str, Any]) -> None:
    """ConfigError for a key of --config that was meant for the allocation. Others are refused with the
    config that they are in."""
    known = [*Config.model_fields, *hooks.sections(), "runs", "plugins", "plugins_may_change"]
    for name, value in given.items():
        close = difflib.get_close_matches(name, [*known, *OF_COMMAND], n=1)
        if name not in known and close and close[0] in OF_COMMAND:
            raise ConfigError(
                f"--config has {name}={value!r}, and no such key is known (did you mean {close[0]}?)",
                fix=f"for the allocation of one command: {', '.join(OF_COMMAND)}",
            )


def _merge(into: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def read_runs(
    settings: Any, given: Mapping[str, Any] | None = None, *, main: bool
) -> dict[str, ResolvedConfig]:
    """Run name -> resolved config, for every row of the sheet (key `runs`, else config/runs.tsv).

    settings: as for `read_config`. given: taken in place of what that reads. main: False for the
    Snakemake inside a job, which keeps the runs as they were submitted: the config may have been edited
    while the job was in the queue; one that is to take jobs back (FORGE_CONTROLLED) keeps them, too.

    Raises ForgeError for a bad config or sheet, for a run that cannot resume from its checkpoint or whose
    parent has changed, and for a new one that cannot start from its parent's. Refused here, since
    Snakemake removes a rule's outputs before it starts the rule.
    """
    if values := _as_submitted(main):
        project_plugins.use(values.get("plugins", {}), "the job")
        submitted: dict[str, Any] = values["submitted"]
        runs = {
            name: checked(ResolvedConfig, values, "the job") for name, values in submitted.items()
        }
        if main:
            _check_starts(runs)
        return runs
    base = dict(read_config(settings) if given is None else given)
    sheet = str(base.pop("runs", SHEET))
    use_plugins(base)
    configs = run_configs(base, sheet)
    family.refuse_circles(configs)
    runs = {name: resolve(config) for name, config in family.with_steps(configs).items()}
    shared_folders(runs)
    for name, config in runs.items():
        hooks.check_run(config, f"run {name}")
    warnings = _check_starts(runs)
    for line in warnings if main else ():
        say(line)
    return runs


def _as_submitted(main: bool) -> dict[str, Any]:
    """Values that `keep_for_jobs` has written for this Snakemake; {} where it reads the config itself."""
    given = os.environ.get(adopt.CONTROLLED if main else SUBMITTED)
    values: dict[str, Any] = read_json(Path(given)) if given else {}
    return values


def _check_starts(runs: dict[str, ResolvedConfig]) -> list[str]:
    """Warnings. Raises ForgeError for a run that cannot start, or resume."""
    return [
        f"{name}: {line}"
        for name, config in runs.items()
        for line in program_of(config).check_start(runs)
    ]


def read_layouts(
    settings: Any,
    resources: Mapping[str, Any],
    given: Mapping[str, Any] | None = None,
    *,
    main: bool,
) -> dict[str, dict[str, Any]]:
    """Run name -> nodes, ranks, GPUs and partition, from the columns `nodes` and `tasks_per_node` of the
    sheet and from --config; inside a job as they were submitted. {} without either. given: as for
    `read_runs`. Raises ConfigError.
    """
    if submitted := _as_submitted(main):
        layouts: dict[str, dict[str, Any]] = submitted["layouts"]
        return layouts
    base = read_config(settings) if given is None else given
    sheet = str(base.get("runs", SHEET))
    of_command = command_resources(settings.config)
    columns: dict[str, dict[str, Any]] = {}
    for row in read_rows(sheet):
        if twice := of_command.keys() & row.layout.keys():
            name = sorted(twice)[0]
            raise ConfigError(
                f"--config has {name}={of_command[name]}, and {sheet}, line {row.line} (run {row.run}),"
                f" column {name}: {row.layout[name]}",
                fix="change the cell, or leave it empty; --config is for what the sheet does not say",
            )
        columns[row.run] = {**row.layout, **of_command}
    return run_layouts(resources, columns)


def known_failures(runs: dict[str, ResolvedConfig]) -> dict[str, str]:
    """Run name -> what `forge train` would say at once, for the runs whose config has failed before.

    Told here, such a run costs no allocation, and the other runs of the sheet are trained.
    """
    failures = {}
    for name, config in runs.items():
        try:
            train.refuse_known_failure(config.of_training, RunPaths.of(config))
        except TrainingError as err:
            failures[name] = str(err)
    return failures


def resumable_steps(runs: dict[str, ResolvedConfig]) -> dict[str, int]:
    """Run name -> step of its checkpoint, for the runs that have one."""
    steps = {name: program_of(config).resumable_step() for name, config in runs.items()}
    return {name: step for name, step in steps.items() if step is not None}


def remove_stop_files(runs: dict[str, ResolvedConfig], say: Callable[[str], None]) -> None:
    """Let runs that a STOP file has stopped train again."""
    for config in runs.values():
        stop = RunPaths.of(config).stop
        if stop.exists():
            stop.unlink()
            say(f"removed {stop}")
