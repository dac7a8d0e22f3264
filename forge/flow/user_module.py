"""Workflow as a module of a user's Snakefile: its config, its names, its start.

Snakemake gives a module the config of the `module` statement, renames its rules and paths where the user
says so, and calls no `onstart` of a module.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from forge.core.config import CONFIG
from forge.core.errors import ConfigError
from forge.core.values import shown
from forge.flow.runs import SUBMITTED, read_config
from forge.flow.snakemake_private import end_at_sigterm, end_where, quiet_stops, refusal
from forge.hosts.allocation import OF_COMMAND
from forge.slurm import slurm
from forge.slurm.jobs import TRAIN_RULE


def is_read_again(workflow: Any) -> bool:
    """Return whether this Snakemake has read these rules before: it does so for each `use rule NAME from
    forge with:` behind `use rule *`."""
    return hasattr(workflow, "forge_start")


def start_with(
    workflow: Any, before_plan: Callable[[bool], None], start: Callable[[], None]
) -> None:
    """Call `before_plan` before Snakemake plans what it will execute, not inside a job; its argument says
    whether this is a dry run. Call `start` before the first job, and before the `onstart` of the user's
    own Snakefile.

    Snakemake itself calls one `onstart` only: the last in the main Snakefile and its includes, none of a
    module. Which one that is, is known when all is read. Not in a dry run and not inside a job. A command
    with --no-hooks, which would leave it out, is refused. With --touch nothing is planned.
    """
    if is_read_again(workflow):
        return
    workflow.forge_start = start
    execute = workflow.execute

    def execute_with_start(*arguments: Any, **options: Any) -> Any:
        if workflow.is_main_process and workflow.execution_settings.no_hooks:
            _refuse_no_hooks()
        end_at_sigterm()
        if not workflow.is_main_process:
            end_where(slurm.is_superseded)
        executor = (arguments[0] if arguments else options["executor_plugin"]).common_settings
        build = workflow._build_dag

        def plan() -> Any:
            if workflow.is_main_process and not executor.touch_exec:
                before_plan(executor.dryrun_exec)
            return build()

        workflow._build_dag = plan
        own = workflow._onstart

        def both(log: Any) -> None:
            start()
            own(log)

        workflow._onstart = both
        with quiet_stops() if workflow.is_main_process else nullcontext():
            return execute(*arguments, **options)

    workflow.execute = execute_with_start


def _refuse_no_hooks() -> None:
    raise refusal(
        "--no-hooks leaves out what Forge does before the first job: its checks, and the config files"
        " that its rules read. Rerun the command without it."
    )


def refuse_other_names(workflow: Any) -> None:
    """ConfigError for rules or paths of the module under other names than here."""
    modifier, paths = workflow.modifier, workflow.modifier.path_modifier
    if (name := modifier.modify_rulename(TRAIN_RULE)) != TRAIN_RULE:
        raise ConfigError(
            f"the rule {TRAIN_RULE} is used under the name {name}",
            cause="`as` in `use rule … from forge as …`",
            fix="write `use rule * from forge`, without `as`: set-resources and set-threads of profiles,"
            " localrules, and the names of jobs in squeue are about these names. Give your own rules"
            " other ones, or leave some of Forge's out: `use rule * from forge exclude report`",
        )
    if paths.replace_prefix("results/x", "output") != "results/x":
        raise ConfigError(
            "the module has a prefix for its paths",
            cause="`prefix` or `replace_prefix` in the module statement",
            fix=f"remove it, and set `results` and `data` in {CONFIG}",
        )


def given_config(workflow: Any, values: dict[str, Any]) -> dict[str, Any] | None:
    """The config that the module statement gives; None without any, as where this is no module.

    values: the global `config` of the module. Inside a job also None: its runs are those that were
    submitted. Where they are what Snakemake has read from the files of
    `configfile:`, or one section of that, the same files are read by Forge, which reads some values in
    another way (`read_config`). Raises ConfigError.
    """
    in_job = not workflow.is_main_process and SUBMITTED in os.environ
    if in_job or not workflow.modifier.skip_configfile:
        return None
    if not isinstance(values, dict):
        raise ConfigError(
            f"`config:` of the module is {shown(values)}, not keys and values",
            fix='write `config: config`, below a `configfile: "config/config.yaml"` of your Snakefile',
        )
    settings = workflow.config_settings
    files = [str(file) for file in workflow.configfiles[len(settings.configfiles) :]]
    as_read = _read_by_snakemake(settings, files)
    if values == as_read:
        return read_config(settings, files)
    for name, section in as_read.items():
        if values == section:
            return dict(read_config(settings, files)[name])
    return {name: value for name, value in values.items() if name not in OF_COMMAND}


def _read_by_snakemake(settings: Any, files: list[str]) -> dict[str, Any]:
    """The global `config` of a Snakefile, as `configfile:` of these files makes it."""
    from snakemake.common.configfile import load_configfile
    from snakemake.utils import update_config

    merged: dict[str, Any] = {}
    if not settings.replace_workflow_config:
        for file in files:
            update_config(merged, load_configfile(file))
    update_config(merged, settings.overwrite_config)
    return merged
