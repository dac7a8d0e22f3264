"""Things that the options of a subcommand name: config, machine, layout, a saved run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from forge.core.config import Config, ResolvedConfig, load_config


def settings_of(options: argparse.Namespace) -> Any:
    """Content of the file of --settings; None without it."""
    from forge.core.records import RunSettings

    return RunSettings.read(Path(options.settings)) if options.settings else None


def use_settings(options: argparse.Namespace) -> None:
    """Let the sections in the file of --settings hold; keys of the command line win."""
    if settings := settings_of(options):
        options.overrides = {**settings.sections, **options.overrides}


def config_of(options: argparse.Namespace) -> Config:
    """The config that the command line names, with its overrides."""
    return load_config(options.config, options.overrides)


def resolved_config_of(options: argparse.Namespace) -> ResolvedConfig:
    """The same with the content ids of its data, and with the steps of a parent."""
    from forge.checkpoint.family import with_steps
    from forge.data.content_ids import resolve

    [config] = with_steps({"": config_of(options)}).values()
    return resolve(config)


def machine_of(options: argparse.Namespace) -> Any:
    """The Machine of --machine, with overrides and an exported time-out of the fabric."""
    from forge.core.machine import load_machine
    from forge.hosts.network import with_exported_timeout

    machine = load_machine(options.machine, options.machine_overrides)
    given = "fabric.timeout_sec" in options.machine_overrides
    return machine if given else with_exported_timeout(machine)


def layout_of(options: argparse.Namespace) -> Any:
    """The WorldLayout that --nodes and --ranks-per-node ask for."""
    from forge.hosts.placement import WorldLayout

    return WorldLayout(options.nodes, options.ranks_per_node)


def fitting_layout_of(options: argparse.Namespace, machine: Any, config: Config) -> Any:
    """Return the layout of `layout_of`, or of fewer nodes where the job got fewer (slurm.nodes_min)."""
    from forge.hosts.placement import fitting_layout

    return fitting_layout(machine, layout_of(options), config)


def saved_run(options: argparse.Namespace, place: Any, *needed: str, writes: bool = False) -> Any:
    """The run in a directory that is named, or the checkpoint of Forge's own trainer. needed: as for
    `trusted`. writes: whether the command writes beside checkpoints of Forge's own trainer."""
    from forge.reporting.trusted import is_of_program, run_of, trusted, trusted_data
    from forge.run.forge_trainer import ForgeRun
    from forge.run.programs import program_of

    if is_of_program(place):
        accepted = trusted(place, options.its_config, options.overrides, *needed)
        return program_of(accepted.config)
    data = trusted_data(run_of(place), options.its_config, writes=writes)
    return ForgeRun(place, None, {"data": data, **options.overrides})
