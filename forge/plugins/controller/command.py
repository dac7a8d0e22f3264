"""Subcommands `forge submit`, and `forge controller`, which its job runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from forge.commands.subcommands import Subcommands


def add_submit(subcommands: Subcommands) -> None:
    """Add the subcommands."""
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
    parse = submit.parse_known_args

    def parse_own(
        words: Sequence[str], namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        own, of_snakemake = _divided(words)
        options, rest = parse(own, namespace)
        options.of_snakemake = of_snakemake
        return options, rest

    submit.parse_known_args = parse_own  # as the parser of `forge` calls it
    subcommands.hidden("controller", _controller, "what the job of `forge submit` runs")


def _divided(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words behind `forge submit` that are its own, and those that are Snakemake's."""
    if words[:1] in (["-h"], ["--help"]):
        return [*words], []
    for at, word in enumerate(words):
        if word == "--stop":  # which Snakemake does not have
            return [word, *(job for job in words[at + 1 : at + 2] if job.isdigit())], []
        if word.startswith("--stop="):
            return [word], []
    return [], [*words]


def _submit(options: argparse.Namespace) -> None:
    from forge.plugins.controller.submit import stop, submit

    if options.stop is not None:
        stop(options.stop)
    else:
        submit(options.of_snakemake)


def _controller(_options: argparse.Namespace) -> None:
    from forge.plugins.controller.control import control

    control()
