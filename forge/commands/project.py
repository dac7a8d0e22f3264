"""Subcommand for a new project."""

from __future__ import annotations

import argparse

from forge.attestation.verify import path_option
from forge.commands.subcommands import Subcommands


def add_project(subcommands: Subcommands) -> None:
    """Add the subcommand."""
    init = subcommands.plain(
        "init",
        _init,
        "write a new project that uses Forge's workflow as a module",
        keys=False,
    )
    init.add_argument(
        "folder", metavar="DIR", type=path_option, help="a directory that is not there yet"
    )


def _init(options: argparse.Namespace) -> None:
    from forge.run.init import init

    init(options.folder)
