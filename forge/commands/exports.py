"""The subcommand that hands a model on."""

from __future__ import annotations

import argparse

from forge.attestation.verify import path_option
from forge.commands.of_options import saved_run
from forge.commands.subcommands import Subcommands, its_config_option
from forge.core import hooks


def add_exports(subcommands: Subcommands) -> None:
    """Add the subcommand that hands a model on."""
    parser = subcommands.logged(
        "export", _export, "write a checkpoint as a directory that others load"
    )
    its_config_option(parser)
    option = parser.add_argument
    option("run", metavar="RUN", help="directory or name of a run, or directory of a checkpoint")
    option("--format", choices=("safetensors",), default="safetensors", help="file format")
    option(
        "--to",
        metavar="DIR",
        type=path_option,
        help="default: export/step-… in the run's directory",
    )
    option(
        "--dtype", choices=("fp32", "bf16"), default="fp32", help="of the weights (default: fp32)"
    )
    hooks.add_options("export", parser)


def _export(options: argparse.Namespace) -> None:
    from forge.checkpoint.export_folder import record_export
    from forge.reporting.find_runs import find_runs
    from forge.reporting.trusted import run_of

    steps = hooks.export_steps(options)  # refused before anything is written
    (run,) = find_runs([options.run])
    saved = saved_run(options, run, writes=not options.to)
    is_new = bool(options.to) and not options.to.exists()
    folder = saved.export(options.to, options.dtype)
    own = run_of(run)
    # The record is of the newest checkpoint, by which the target `export` is made.
    if not options.to and (own is run or run.root.resolve() == own.latest.resolve()):
        record_export(folder)
    for step in steps:
        step(folder, saved, None if is_new else options.dtype)
