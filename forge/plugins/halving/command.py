"""Subcommand `forge halve`."""

from __future__ import annotations

import argparse
from fractions import Fraction
from math import inf
from pathlib import Path

from forge.commands.subcommands import Subcommands
from forge.core.errors import ConfigError


def add_halve(subcommands: Subcommands) -> None:
    """Add the subcommand."""
    text = (
        "let the best runs of the sample sheet train on, by a larger train.max_steps in their cells"
    )
    parser = subcommands.plain("halve", _halve, text, keys=False)
    option = parser.add_argument
    option(
        "runs",
        metavar="RUN",
        nargs="*",
        help="of the sheet (default: all with the largest train.max_steps)",
    )
    option(
        "--keep",
        metavar="SHARE",
        type=_share,
        required=True,
        help="of the runs that train on, such as 1/3; at least one",
    )
    option("--to", metavar="STEP", type=int, required=True, help="their new train.max_steps")
    option("-n", "--dry-run", action="store_true", help="change nothing")


def _share(text: str) -> Fraction:
    """The value of --keep."""
    try:
        share = Fraction(text)
    except (ValueError, ZeroDivisionError):
        share = Fraction(0)
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is no share between 0 and 1, as 1/3 or 0.5")
    return share


def _halve(options: argparse.Namespace) -> None:
    from forge.core.files import atomic_open, disk_trouble
    from forge.core.sample_sheet import read_rows
    from forge.core.terminal import print_plain
    from forge.core.values import read_text
    from forge.plugins.halving.ranking import check_constant_rate, contenders_of, ranked
    from forge.plugins.halving.sheet import with_steps_of
    from forge.reporting.trusted import project_runs

    configs, sheet = project_runs()
    runs = contenders_of(configs, options.runs)
    step = configs[runs[0]].train.max_steps
    if options.to <= step:
        raise ConfigError(
            f"--to is {options.to}, and these runs are at step {step}", fix="name a later step"
        )
    check_constant_rate({run: configs[run] for run in runs}, step, options.to)
    order, unit = ranked({run: configs[run] for run in runs}, step)
    number = max(1, int(len(order) * options.keep))
    if order[number - 1].value == inf:
        raise ConfigError(
            f"{number} of {len(order)} runs would train on, and fewer have reached step {step}",
            fix="keep fewer, or see why the others failed: forge status",
        )
    kept = [one.run for one in order[:number]]
    path = Path(sheet).resolve()
    text = with_steps_of(read_text(path, "sample sheet"), read_rows(path), kept, options.to)
    print_plain(f"validation at step {step}, in {unit}:")
    for place, one in enumerate(order, 1):
        value = "failed" if one.value == inf else f"{one.value:.4f}"
        print_plain(
            f"{place:4d}  {value}  {one.run}{f'  to step {options.to}' * (one.run in kept)}"
        )
    if options.dry_run:
        print_plain(f"{sheet} is unchanged (--dry-run)")
        return
    ends = "\r\n" if b"\r\n" in path.read_bytes() else "\n"
    with disk_trouble(path), atomic_open(path) as file:
        file.write(text.replace("\n", ends).encode())
    print_plain(
        f"{sheet}: {number} of {len(order)} runs have train.max_steps {options.to}; the workflow's next"
        " command resumes them from their last checkpoints"
    )
