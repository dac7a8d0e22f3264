"""Subcommands `forge report` and `forge compare`."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from forge.attestation.verify import path_option
from forge.commands.of_options import config_of
from forge.commands.subcommands import RUNS, Subcommands
from forge.core.terminal import say

if TYPE_CHECKING:
    from forge.core.paths import RunPaths


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

    path = write_report(_named_run(options.config) or RunPaths.of(config_of(options)))
    say(f"report: {path}")


def _named_run(named: str) -> RunPaths | None:
    """The run of a directory, or of a checkpoint, in which no page is written; None for a config of the
    user's own. Raises ConfigError for a checkpoint that is in no run."""
    from forge.checkpoint.resume import is_checkpoint
    from forge.core.errors import ConfigError
    from forge.reporting.trusted import directory_of, run_of

    place = directory_of(named)
    run = run_of(place) if place else None
    if run and is_checkpoint(run.root):
        raise ConfigError(
            f"{run.root} is a checkpoint outside of a run's directory, of which there is no report",
            fix="name a run's directory such as results/base",
        )
    return run


def _compare(options: argparse.Namespace) -> None:
    from forge.plugins.pages.compare import compare
    from forge.reporting.find_runs import find_runs

    compare(find_runs(options.runs, with_config=True), as_json=options.json, page=options.html)
