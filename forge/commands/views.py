"""Subcommands that show runs."""

from __future__ import annotations

import argparse

from forge.commands.subcommands import RUNS, Subcommands
from forge.core.errors import ConfigError


def add_views(subcommands: Subcommands) -> None:
    """Add the subcommands that show runs."""
    show = subcommands.plain("show", _show, "show status, samples and lineage of runs", keys=False)
    show.add_argument("runs", nargs="*", metavar="RUN", help=RUNS)
    _logs_options(
        subcommands.plain(
            "logs", _logs, "show the logs of ranks and launcher, errors first", keys=False
        )
    )
    _status_options(
        subcommands.plain("status", _status, "show the current state of each run", keys=False)
    )


def _logs_options(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("run", metavar="RUN", help="a run's directory, or its name in results/")
    option("--follow", action="store_true", help="keep printing new lines as they are written")
    option("--rank", type=int, metavar="N", help="show the log of rank N")
    option("--restart", metavar="N", help="show restart N, the launch of this name, or all")
    option("--lines", type=int, default=20, metavar="N", help="lines of a log (default: 20)")


def _status_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="*", metavar="RUN", help=RUNS)
    parser.add_argument("--watch", action="store_true", help="refresh every few seconds")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _show(options: argparse.Namespace) -> None:
    from forge.reporting.find_runs import find_runs
    from forge.reporting.show import show

    show(find_runs(options.runs, with_config=True))


def _logs(options: argparse.Namespace) -> None:
    from forge.reporting.find_runs import find_runs
    from forge.reporting.logs import logs

    if options.lines < 0:
        raise ConfigError(
            f"--lines is {options.lines}, but must be 0 or more", fix="leave it out for 20 lines"
        )
    (run,) = find_runs([options.run])
    logs(
        run,
        rank=options.rank,
        restart=options.restart,
        lines=options.lines,
        follow=options.follow,
    )


def _status(options: argparse.Namespace) -> None:
    from forge.reporting.find_runs import find_runs
    from forge.reporting.status import status

    status(find_runs(options.runs), watch=options.watch, as_json=options.json)
