"""Subcommands `forge ladder` and `forge forecast`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from forge.commands.of_options import layout_of, machine_of
from forge.commands.subcommands import Subcommands, machine_options
from forge.core.errors import ConfigError

if TYPE_CHECKING:
    from forge.plugins.ladder.sheet import LadderRow

NUMBERS = ("run", "N", "tokens", "from step", "to step", "FLOPs", "GPU-hours")


def add_ladder(subcommands: Subcommands) -> None:
    """Add the subcommand."""
    text = "write the rows of a ladder into the sample sheet: small runs that forecast larger ones"
    parser = subcommands.plain("ladder", _ladder, text, keys=False)
    for name, default, meaning in (
        ("--depths", "2,3,4,6", "layers of the rungs"),
        ("--seeds", "1,2,3", "of the trunks of each size"),
        ("--budgets", "0.5,1,2", "tokens of the rungs of each size, in 20 per parameter"),
        ("--forecast", None, "layers of the larger runs"),
        ("--at", "1", "their tokens, as --budgets"),
    ):
        kind = _budgets if name in ("--budgets", "--at") else _whole
        told = {"help": f"{meaning} (default: {default})" if default else meaning}
        is_needed = default is None
        parser.add_argument(
            name, metavar="N,N,…", type=kind, default=default, required=is_needed, **told
        )
    option = parser.add_argument
    option("--width-per-depth", metavar="N", type=int, default=64, help="model.dim (default: 64)")
    option("--head", metavar="N", type=int, default=64, help="width of a head (default: 64)")
    option("--name", default="ladder", help="of the runs, before their sizes (default: ladder)")
    option(
        "--sheet", metavar="FILE", type=os.path.expanduser, help="another one than the project's"
    )
    option("-n", "--dry-run", action="store_true", help="change nothing")
    machine_options(parser)


def add_forecast(subcommands: Subcommands) -> None:
    """Add the subcommand."""
    text = "fit the rungs of a ladder, and forecast the losses of its larger runs"
    parser = subcommands.logged("forecast", _forecast, text, keys=False, of_rule=True)
    parser.add_argument(
        "rows", nargs="?", metavar="FILE", help="of the workflow (default: the sample sheet)"
    )


def _budgets(text: str) -> list[float]:
    """The value of an option with positive numbers, sorted."""
    try:
        numbers = sorted(float(one) for one in text.split(","))
    except ValueError:
        numbers = [0.0]
    if not (numbers[0] > 0 and numbers[-1] < 1e6):
        raise argparse.ArgumentTypeError(f"{text!r:.80} is no list of positive numbers, as 0.5,1,2")
    if twice := [one for one, following in pairwise(numbers) if one == following]:
        raise argparse.ArgumentTypeError(f"{text!r:.80} has {twice[0]:g} twice")
    return numbers


def _whole(text: str) -> list[int]:
    """The value of an option with whole numbers."""
    numbers = [int(number) for number in _budgets(text)]
    if numbers != _budgets(text):
        raise argparse.ArgumentTypeError(f"{text!r:.80} is no list of whole numbers, as 2,3,4,6")
    return numbers


def _ladder(options: argparse.Namespace) -> None:
    from forge.core.config import CONFIG, load_config, read_values
    from forge.core.files import atomic_open, disk_trouble
    from forge.core.paths import SHEET
    from forge.core.sample_sheet import read_rows
    from forge.core.terminal import print_plain
    from forge.core.values import read_text
    from forge.plugins.ladder.sheet import FORMULAS, rows_of, with_rows

    base, values = load_config(CONFIG), read_values(CONFIG)
    sheet = Path(options.sheet or str(values.get("runs", SHEET))).resolve()
    for key in ("runs", "plugins", "plugins_may_change"):
        values.pop(key, None)
    rows = rows_of(values, base, options)
    there = {row.run for row in read_rows(sheet)} if sheet.exists() else set()
    if taken := [row.run for row in rows if row.run in there]:
        raise ConfigError(
            f"{sheet} has the run {taken[0]} already, and {len(taken) - 1} more of these",
            fix="remove their lines, or give this ladder another --name",
        )
    text = with_rows(read_text(sheet, "sample sheet") if there else "", rows)
    _print_table(rows, options)
    print_plain(FORMULAS.format(plan=options, train=base.train, model=base.model))
    is_new = not sheet.exists()
    if options.dry_run:
        print_plain(f"{sheet} {'would be a new sheet' if is_new else 'is unchanged'} (--dry-run)")
        return
    ends = "\r\n" if there and b"\r\n" in sheet.read_bytes() else "\n"
    with disk_trouble(sheet), atomic_open(sheet) as file:
        file.write(text.replace("\n", ends).encode())
    named = f", with --config runs={sheet}," if options.sheet else ""
    print_plain(
        f"{sheet}{', a new sheet' if is_new else ''}: {len(rows)} new rows; the target ladder{named}"
        " trains and fits them"
    )


def _print_table(rows: Sequence[LadderRow], options: argparse.Namespace) -> None:
    """Print what each row costs: its own steps, from that of its parent's checkpoint on."""
    from forge.core.terminal import Table, hours, print_plain
    from forge.plugins.ladder.settings import parameters_of, tokens_per_step
    from forge.run.step_time import step_seconds

    machine, layout = machine_of(options), layout_of(options)
    table = Table(NUMBERS, numbers=NUMBERS[1:])
    total, flops = 0.0, 0.0
    for run, _, config, begin in rows:
        steps, tokens = config.train.max_steps, tokens_per_step(config)
        seconds = step_seconds(config, machine, layout)
        vocabulary = config.tokenizer.expected_vocab_size
        each = tokens * config.model.flops_per_token(vocabulary, config.train.seq_len)
        cost = 0.0 if seconds is None else (steps - begin) * seconds * layout.world_size / 3600
        total, flops = total + cost, flops + (steps - begin) * each
        numbers = (parameters_of(config), steps * tokens, begin, steps)
        texts = [f"{(steps - begin) * each:.2e}", hours(cost) if seconds else "-"]
        table.add([run, *map("{:,}".format, numbers), *texts], {})
    table.print()
    known = (
        f"{hours(total)} GPU-hours" if total else "GPU-hours: --machine names no GPU that is known"
    )
    print_plain(f"in all {flops:.2e} FLOPs; {known} (the estimate of forge plan)")


def _forecast(options: argparse.Namespace) -> None:
    from forge.plugins.ladder.forecast import write_forecasts
    from forge.plugins.ladder.records import LadderRows, rows_of
    from forge.reporting.trusted import project_runs

    rows = LadderRows.read(Path(options.rows)) if options.rows else rows_of(project_runs()[0])
    write_forecasts(rows)
