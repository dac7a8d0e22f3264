"""Subcommands for a new project, its profile, and its workflow without a terminal."""

from __future__ import annotations

import argparse
from pathlib import Path

from forge.commands.subcommands import Subcommands


def add_project(subcommands: Subcommands) -> None:
    """A new project, its profile, and its workflow without a terminal."""
    init = subcommands.plain(
        "init",
        _init,
        "write a new project that uses Forge's workflow as a module",
        keys=False,
    )
    init.add_argument("folder", metavar="DIR", type=Path, help="a directory that is not there yet")
    _profile_options(
        subcommands.plain(
            "profile",
            _profile,
            "write a profile for this cluster, from what its Slurm says",
            keys=False,
        )
    )
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


def _profile_options(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("name", metavar="NAME", nargs="?", default="", help="directory to make in profiles/")
    option(
        "--partition", metavar="NAME", default="", help="of training (default: with the best GPUs)"
    )
    option("--gpus", type=int, metavar="N", help="GPUs of a node (default: all); 0: train on CPUs")
    option("--nodes", type=int, metavar="N", help="nodes that train (default: 2)")
    option("--save", type=Path, metavar="FILE", help="write Slurm's answers to FILE as well")
    option("--from", dest="answers", type=Path, metavar="FILE", help="read them from FILE instead")


def _init(options: argparse.Namespace) -> None:
    from forge.run.init import init

    init(options.folder)


def _profile(options: argparse.Namespace) -> None:
    from forge.cluster.profile import profile
    from forge.cluster.site_choice import Wishes

    wishes = Wishes(options.partition, options.gpus, options.nodes)
    profile(options.name, wishes, options.answers, options.save)


def _submit(options: argparse.Namespace) -> None:
    from forge.controller.submit import stop, submit

    if options.stop is not None:
        stop(options.stop)
    else:
        submit(options.of_snakemake)


def _controller(_options: argparse.Namespace) -> None:
    from forge.controller.control import control

    control()
