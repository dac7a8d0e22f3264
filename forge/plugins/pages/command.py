"""Subcommands `forge report` and `forge compare`."""

from __future__ import annotations

import argparse
import os

from forge.attestation.verify import path_option
from forge.commands.of_options import config_of
from forge.commands.subcommands import RUNS, Subcommands
from forge.core.terminal import say


def add_report(subcommands: Subcommands) -> None:
    """Add the subcommand."""
    subcommands.with_config("report", _report, "write the run's report.html")


def add_compare(subcommands: Subcommands) -> None:
    """Add the subcommand."""
    compare = subcommands.plain(
        "compare", _compare, "show runs side by side: configs, losses, cost", keys=False
    )
    compare.add_argument("runs", nargs="*", metavar="RUN", help=RUNS)
    compare.add_argument("--json", action="store_true", help="print JSON")
    compare.add_argument("--html", metavar="FILE", type=path_option, help="write a page instead")
    compare.add_argument(
        "--log", metavar="FILE", type=os.path.expanduser, help="also append all messages to FILE"
    )


def _report(options: argparse.Namespace) -> None:
    from forge.core.paths import RunPaths
    from forge.core.process import fast_imports

    with fast_imports():
        from forge.plugins.pages.report import write_report
        from forge.reporting.trusted import directory_of

    path = write_report(directory_of(options.config) or RunPaths.of(config_of(options)))
    say(f"report: {path}")


def _compare(options: argparse.Namespace) -> None:
    from forge.plugins.pages.compare import compare
    from forge.reporting.find_runs import find_runs

    compare(find_runs(options.runs, with_config=True), as_json=options.json, page=options.html)
