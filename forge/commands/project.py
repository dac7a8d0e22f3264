"""Subcommands for a new project, and its workflow without a terminal."""

from __future__ import annotations

import argparse
from pathlib import Path

from forge.commands.subcommands import Subcommands


def add_project(subcommands: Subcommands) -> None:
    """Add the subcommands for a new project, and its workflow without a terminal."""
    init = subcommands.plain(
        "init",
        _init,
        "write a new project that uses Forge's workflow as a module",
        keys=False,
    )
    init.add_argument("folder", metavar="DIR", type=Path, help="a directory that is not there yet")
    submit = subcommands.plain(
        "submit", _submit, "run a Snakemake command as a Slurm job of its own", keys=False
    )
    submit.usage = (
        "forge submit --profile PROFILE [arguments of snakemake]\n       forge submit --stop [JOB]"
    )
    submit.epilog = (
        "All arguments are Snakemake's. Example: forge submit --profile profiles/mine train"
    )
    submit.add_argument(
        "--stop",
        nargs="?",
        const="",
        metavar="JOB",
        help="end the controller and its jobs, with a checkpoint; JOB: which, where several live",
    )
    subcommands.hidden("controller", _controller, "what the job of `forge submit` runs")


def _init(options: argparse.Namespace) -> None:
    from forge.run.init import init

    init(options.folder)


def _submit(options: argparse.Namespace) -> None:
    from forge.plugins.controller.submit import stop, submit

    if options.stop is not None:
        stop(options.stop)
    else:
        submit(options.of_snakemake)


def _controller(_options: argparse.Namespace) -> None:
    from forge.plugins.controller.control import control

    control()
