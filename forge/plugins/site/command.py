"""Subcommand `forge profile`."""

from __future__ import annotations

import argparse

from forge.attestation.verify import path_option
from forge.commands.subcommands import Subcommands


def add_profile(subcommands: Subcommands) -> None:
    """Add the subcommand."""
    parser = subcommands.plain(
        "profile",
        _profile,
        "write a profile for this cluster, from what its Slurm says",
        keys=False,
    )
    option = parser.add_argument
    option("name", metavar="NAME", nargs="?", default="", help="directory to make in profiles/")
    option(
        "--partition", metavar="NAME", default="", help="of training (default: with the best GPUs)"
    )
    option("--gpus", type=int, metavar="N", help="GPUs of a node (default: all); 0: train on CPUs")
    option("--nodes", type=int, metavar="N", help="nodes that train (default: 2)")
    option("--save", type=path_option, metavar="FILE", help="write Slurm's answers to FILE as well")
    option(
        "--from",
        dest="answers",
        type=path_option,
        metavar="FILE",
        help="read them from FILE instead",
    )


def _profile(options: argparse.Namespace) -> None:
    from forge.plugins.site.profile import profile
    from forge.plugins.site.site_choice import Wishes

    wishes = Wishes(options.partition, options.gpus, options.nodes)
    profile(options.name, wishes, options.answers, options.save)
