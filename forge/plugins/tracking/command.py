"""Subcommand `forge sync`."""

from __future__ import annotations

import argparse

from forge.commands.subcommands import Subcommands, its_config_option
from forge.plugins.tracking.settings import Tracking


def add_sync(subcommands: Subcommands) -> None:
    """Add the subcommand."""
    parser = subcommands.plain(
        "sync", _sync, "send to the trackers what they have not been sent", keys=False
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="directories or names of runs")
    its_config_option(parser)


def _sync(options: argparse.Namespace) -> None:
    from forge.plugins.tracking.feed import sync
    from forge.reporting.find_runs import find_runs
    from forge.reporting.trusted import sections_of_plugins

    runs = find_runs(options.runs, with_config=True)
    accepted = [(run, sections_of_plugins(run, options.its_config, "tracking")) for run in runs]
    sync([(run, config.of(Tracking)) for run, config in accepted])
