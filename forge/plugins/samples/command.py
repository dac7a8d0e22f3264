"""Subcommand `forge samples`."""

from __future__ import annotations

import argparse
import json
import os
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.commands.subcommands import Subcommands
from forge.core.errors import ConfigError
from forge.core.terminal import print_plain, visible

if TYPE_CHECKING:
    from forge.plugins.samples.read import RunSamples

SHOWN = 200  # characters of a document's text, without --full
MOST_STEPS = 10  # of a place, without --full


def add_samples(subcommands: Subcommands) -> None:
    """Add the subcommand."""
    text = "the text that a step of a run has read, or the steps that have read a text"
    parser = subcommands.plain("samples", _samples, text, keys=False)
    option = parser.add_argument
    option("run", metavar="RUN", help="name or directory of a run, or directory of an export")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--step", type=int, metavar="N", help="the samples of this step")
    what.add_argument("--text", metavar="PHRASE", help="the steps that have read this phrase")
    what.add_argument(
        "--file",
        metavar="FILE",
        type=os.path.expanduser,
        help="the steps that have read this input file, by its digest",
    )
    option("--rank", type=int, metavar="R", help="with --step: of this rank alone")
    option(
        "--losses",
        action="store_true",
        help="with --step: the highest loss first; retrains the steps since the last checkpoint",
    )
    option("--full", action="store_true", help="all text and all steps")
    option("--json", action="store_true", help="print JSON, with all text")
    option(
        "--data",
        metavar="DIR",
        type=os.path.expanduser,
        help="with the run's tokens (default: the project's)",
    )
    option(
        "--texts",
        metavar="TEXTS",
        type=os.path.expanduser,
        help="directory with the text files, under whatever names",
    )


def _samples(options: argparse.Namespace) -> None:
    _check(options)
    samples = _samples_of(options)
    if options.step is None:
        found = (
            samples.of_text(options.text) if options.text else samples.of_file(Path(options.file))
        )
        print(json.dumps(found, indent=2)) if options.json else _print_found(found, options)
        return
    rows = samples.of_step(options.step)
    if options.losses:
        for row, loss in zip(rows, samples.losses(options.step), strict=True):
            row["loss"] = loss
        rows.sort(key=lambda row: -inf if row["loss"] is None else -row["loss"])
    if options.rank is not None:
        rows = _of_rank(rows, options.rank)
    print(json.dumps(rows, indent=2)) if options.json else _print_rows(rows, options)


def _samples_of(options: argparse.Namespace) -> RunSamples:
    from forge.attestation.verify import STATEMENT
    from forge.plugins.samples.of_export import stretch_of_export, texts_in
    from forge.plugins.samples.order import stretches
    from forge.plugins.samples.read import RunSamples
    from forge.reporting.find_runs import find_runs
    from forge.reporting.trusted import is_of_program, trusted_data

    if (Path(options.run) / STATEMENT).is_file():
        if options.data is None or options.texts is None:
            raise ConfigError(
                f"{options.run} is an export, which has neither tokens nor texts",
                fix="make its tokens again: forge verify EXPORT --data TEXTS --keep DIR; then add"
                " --data DIR --texts TEXTS",
            )
        stretch = stretch_of_export(Path(options.run), options.data)
        return RunSamples([stretch], options.data, texts_in(options.texts))
    [run] = find_runs([options.run], with_config=True)
    if is_of_program(run):
        raise ConfigError(
            f"{run.root} is a run of another program, which reads its inputs itself",
            fix="name a run of Forge's own trainer",
        )
    data = options.data or trusted_data(run, None)
    return RunSamples(stretches(run, data), data, options.texts and texts_in(options.texts))


def _check(options: argparse.Namespace) -> None:
    """Raises ConfigError for options that do not fit together."""
    if options.step is None and (options.losses or options.rank is not None):
        raise ConfigError("--losses and --rank are for the samples of a step", fix="add --step N")
    if options.text == "":
        raise ConfigError("--text is empty", fix="give at least one character")
    if options.file is not None and not Path(options.file).is_file():
        raise ConfigError(f"--file: there is no file {options.file}", fix="correct the path")


def _of_rank(rows: list[dict[str, Any]], rank: int) -> list[dict[str, Any]]:
    ranks = sorted({row["rank"] for row in rows if row["rank"] is not None})
    if rank not in ranks:
        there = (
            f"ranks {ranks[0]} to {ranks[-1]}" if ranks else "a number of ranks that is not known"
        )
        raise ConfigError(
            f"--rank is {rank}, and the step was trained by {there}", fix="correct it"
        )
    return [row for row in rows if row["rank"] == rank]


# --- for people -----------------------------------------------------------------------------------


def _origin(part: dict[str, Any]) -> str:
    if part["input"]:
        return f"{part['input']}, document {part['document']:,}"
    if part["one_of"]:
        return f"one of {part['one_of']}, which are not here as they were"
    return "ids of another program"


def _number(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.4f}"


def _print_rows(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    for row in rows:
        rank = "" if row["rank"] is None else f", rank {row['rank']}"
        source = f", source {row['source']}" if row["source"] else ""
        loss = f", loss {_number(row['loss'])}" if "loss" in row else ""
        print_plain(
            f"row {row['row']}{rank}: window {row['window']:,}, epoch {row['epoch']}{source}{loss}"
        )
        for part in row["documents"]:
            at = "token" if part["character"] is None else "character"
            print_plain(f"  {_origin(part)}, from {at} {part[at]:,} on")
            text = part["text"] if options.full else _clipped(part["text"])
            print_plain("\n".join(f"    {line}" for line in visible(text).splitlines()))


def _clipped(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} … ({len(text):,} characters)"


def _print_found(found: list[dict[str, Any]], options: argparse.Namespace) -> None:
    for place in found:
        source = f"source {place['source']}, " if place["source"] else ""
        print_plain(f"{source}{_origin(place)}, character {place['character']:,}")
        steps = place["steps"] if options.full else place["steps"][:MOST_STEPS]
        for read in steps:
            print_plain(
                f"  step {read['step']:,} of {read['run']}, epoch {read['epoch']}, row {read['row']}"
            )
        if more := len(place["steps"]) - len(steps):
            print_plain(f"  and {more:,} more: --full")
        if not place["steps"]:
            print_plain("  not read so far")
    if not found:
        print_plain("no training document has this text")
