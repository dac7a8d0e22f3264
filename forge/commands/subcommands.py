"""A subcommand of `forge`: its parser, and options that several have.

Subcommands import what they need inside their functions: `forge --help` must not wait for torch.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

RUNS = "directories or names of runs (default: all runs of the project in the current directory)"

KEYS = "Any config key can be overridden by its dotted name, for example --train.max_steps=1000"
OVERRIDES = f"{KEYS}, and any key of machine.yaml with --machine.KEY=VALUE."


class Subcommands:
    """Adds subcommands to the parser."""

    def __init__(self, subparsers: Any) -> None:
        self._subparsers = subparsers
        self.of_rules: list[str] = []

    def plain(
        self,
        name: str,
        action: Callable[[argparse.Namespace], None],
        text: str,
        *,
        keys: bool = True,
        of_rule: bool = False,
    ) -> Any:
        """keys: whether config keys can be overridden with options. of_rule: whether a rule calls it and
        people seldom do: `forge --help` names it without its text."""
        epilog, shown = f"{KEYS}." if keys else None, {} if of_rule else {"help": text}
        added = self._subparsers.add_parser(name, description=text, epilog=epilog, **shown)
        self.of_rules += [name] if of_rule else []
        added.allow_abbrev = False
        added.set_defaults(action=action, takes_overrides=keys, parser=added, log=None)
        return added

    def hidden(self, name: str, action: Callable[[argparse.Namespace], None], text: str) -> None:
        """One that Forge itself calls: without `help`, argparse does not list it."""
        added = self._subparsers.add_parser(name, description=text, allow_abbrev=False)
        added.set_defaults(action=action, takes_overrides=False, parser=added, log=None)

    def logged(
        self,
        name: str,
        action: Callable[[argparse.Namespace], None],
        text: str,
        *,
        keys: bool = True,
        of_rule: bool = False,
    ) -> Any:
        """With --log. keys, of_rule: as for `plain`."""
        added = self.plain(name, action, text, keys=keys, of_rule=of_rule)
        added.add_argument(
            "--log",
            metavar="FILE",
            type=os.path.expanduser,
            help="also append all messages to FILE",
        )
        return added

    def with_config(
        self,
        name: str,
        action: Callable[[argparse.Namespace], None],
        text: str,
        what: str = "config.yaml, or a run's config.json",
        *,
        of_rule: bool = False,
    ) -> Any:
        """With --log and a config. what: that its argument names. of_rule: as for `plain`."""
        added = self.logged(name, action, text, of_rule=of_rule)
        added.add_argument("config", metavar="CONFIG", help=what)
        return added


def machine_options(parser: argparse.ArgumentParser) -> None:
    """For `machine_of` and `layout_of`."""
    parser.epilog = parser.epilog and OVERRIDES
    option = parser.add_argument
    option(
        "--machine",
        metavar="FILE",
        type=os.path.expanduser,
        help="machine.yaml of a profile (default: built-in values)",
    )
    option("--nodes", type=int, default=1, metavar="N", help="number of nodes (default: 1)")
    option("--ranks-per-node", type=int, default=1, metavar="N", help="ranks per node (default: 1)")


def its_config_option(parser: argparse.ArgumentParser) -> None:
    """For commands to which the directory of a run is named."""
    parser.add_argument(
        "--config",
        dest="its_config",
        metavar="FILE",
        type=os.path.expanduser,
        help="config of the run, for one that is not in the project's sample sheet: what is executed,"
        " contacted or opened comes from it",
    )


def settings_option(parser: argparse.ArgumentParser) -> None:
    """For `settings_of`."""
    parser.add_argument(
        "--settings",
        metavar="FILE",
        type=os.path.expanduser,
        help="of the workflow: sections validate, report and those of plugins of the run's config",
    )
