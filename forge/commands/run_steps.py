"""Subcommands that make a run, from staging to its validation."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from forge.commands.of_options import (
    config_of,
    fitting_layout_of,
    layout_of,
    machine_of,
    resolved_config_of,
    saved_run,
    settings_of,
    use_settings,
)
from forge.commands.subcommands import (
    Subcommands,
    its_config_option,
    machine_options,
    settings_option,
)
from forge.core import hooks


def add_run_steps(subcommands: Subcommands) -> None:
    """Add the subcommands that work on one run."""
    add_step = partial(subcommands.with_config, of_rule=True)
    machine_options(add_step("stage", _stage, "copy shards or inputs to the nodes' local disks"))
    machine_options(add_step("preflight", _preflight, "check nodes and ranks before training"))
    train = subcommands.with_config(
        "train", _train, "train up to the goal, resuming from the last checkpoint"
    )
    train.add_argument(
        "--require-checkpoint",
        action="store_true",
        help="exit with 65 when there is no checkpoint, instead of starting at step 0",
    )
    settings_option(train)
    machine_options(train)
    validate = subcommands.with_config(
        "validate",
        _validate,
        "check the last checkpoint of a run, or a given checkpoint",
        "config.yaml, a run's config.json, or the directory of a run or of a checkpoint",
    )
    its_config_option(validate)
    settings_option(validate)
    _validate_options(validate)
    machine_options(
        subcommands.with_config(
            "plan", _plan, "show the memory, checkpoints and time a run will need"
        )
    )
    add_step("config", _config, "write the run's config.json, with every default filled in")


def _validate_options(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("--all", action="store_true", help="check every checkpoint of the run and print a table")
    option("--fix", action="store_true", help="as --all, and move corrupt ones to quarantine/")


def _stage(options: argparse.Namespace) -> None:
    from forge.run.requeue import before_training
    from forge.staging.stage import stage

    machine = machine_of(options)

    def step() -> None:
        config = resolved_config_of(options)
        stage(config, machine, fitting_layout_of(options, machine, config))

    before_training(machine, step)


def _preflight(options: argparse.Namespace) -> None:
    from forge.core.paths import RunPaths, place_logs
    from forge.launch.rank import refuse_left_over
    from forge.preflight.preflight import preflight
    from forge.run.requeue import before_training

    refuse_left_over()
    machine = machine_of(options)

    def step() -> None:
        config = resolved_config_of(options)
        place_logs(RunPaths.of(config))
        preflight(config, machine, fitting_layout_of(options, machine, config))

    before_training(machine, step)


def _train(options: argparse.Namespace) -> None:
    from forge.core.paths import RunPaths, place_logs
    from forge.launch.rank import refuse_left_over
    from forge.reporting.trusted import training_settings
    from forge.run.train import train

    refuse_left_over()
    config, machine = resolved_config_of(options), machine_of(options)
    layout = fitting_layout_of(options, machine, config)
    hooks.check_run(config, options.config, trains=True)
    place_logs(RunPaths.of(config))
    settings = settings_of(options) or training_settings(options.config, config, options.overrides)
    train(config, machine, layout, settings, require_checkpoint=options.require_checkpoint)


def _plan(options: argparse.Namespace) -> None:
    from forge.checkpoint.family import with_steps
    from forge.data.model import with_pretrained
    from forge.run.plan import plan

    [config] = with_steps({"": config_of(options)}).values()
    plan(with_pretrained(config), machine_of(options), layout_of(options))


def _validate(options: argparse.Namespace) -> None:
    from forge.core.process import fast_imports

    use_settings(options)
    with fast_imports():
        from forge.validation.validate import validate, validate_all

        run = _to_validate(options)
    if options.all or options.fix:
        validate_all(run, fix=options.fix)
    else:
        validate(run)


def _to_validate(options: argparse.Namespace) -> Any:
    """The run or checkpoint that is named, as a SavedRun."""
    from forge.reporting.trusted import directory_of, trusted
    from forge.run.programs import program_of

    run = directory_of(options.config)
    if run is None:
        return program_of(resolved_config_of(options))
    needed = ["data"] if options.all or options.fix else ["program.validate", "data"]
    if Path(options.config).is_dir():
        return saved_run(options, run, *needed)
    accepted = trusted(run, options.its_config, options.overrides, *needed)
    return program_of(accepted.config)


def _config(options: argparse.Namespace) -> None:
    from forge.core.paths import RunPaths

    config = resolved_config_of(options)
    config.write(RunPaths.of(config).config)
