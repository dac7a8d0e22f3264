"""Subcommand `forge merge`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from fractions import Fraction

from forge.commands.subcommands import Subcommands
from forge.core.errors import ConfigError

LAST = 5  # checkpoints, at most, where none are named


def add_merge(subcommands: Subcommands) -> None:
    """Add the subcommand."""
    text = "write a mean of checkpoints of a run, and compare its validation loss with the newest one's"
    parser = subcommands.plain("merge", _merge, text, keys=False)
    option = parser.add_argument
    option("run", metavar="RUN", help="name or directory of a run")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--steps", metavar="N,N,…", type=_steps, help="of the checkpoints to merge")
    which.add_argument(
        "--last",
        metavar="K",
        type=int,
        help=f"the newest K ones (default: {LAST}, or all there are)",
    )
    option(
        "--form",
        choices=("mean", "minus-sqrt", "weights"),
        help="equal weights (default), those of a learning rate that decays as 1 - sqrt, or --weights",
    )
    option(
        "--weights",
        metavar="C,C,…",
        type=_fractions,
        help="decimals or fractions, oldest first, whose sum is 1",
    )
    option(
        "--data",
        metavar="DIR",
        type=os.path.expanduser,
        help="with the run's tokens (default: the project's)",
    )


def _steps(text: str) -> list[int]:
    """The value of --steps."""
    try:
        return [int(one) for one in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r:.80} is no list of steps, as 300,400,500"
        ) from None


def _fractions(text: str) -> list[Fraction]:
    """The value of --weights, exactly."""
    try:
        return [Fraction(one) for one in text.split(",")]
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(
            f"{text!r:.80} is no list of numbers, as 0.2,0.3,0.5 or 1/3,1/3,1/3"
        ) from None


def _merge(options: argparse.Namespace) -> None:
    from forge.plugins.merge.choose import chosen
    from forge.reporting.find_runs import find_runs
    from forge.reporting.trusted import is_of_program, trusted_data

    [run] = find_runs([options.run], with_config=True)
    if is_of_program(run):
        raise ConfigError(
            f"{run.root} is a run of another program, whose weights Forge does not read",
            fix="name a run of Forge's own trainer",
        )
    form = options.form or ("weights" if options.weights else "mean")
    checkpoints = chosen(run, options.steps, options.last, LAST)
    weights = _weights(form, options.weights, [one.step for one in checkpoints])
    data = options.data or trusted_data(run, None, writes=True)
    from forge.plugins.merge.merge import merge

    merge(run, checkpoints, form, weights, data)


def _weights(form: str, given: Sequence[Fraction] | None, steps: Sequence[int]) -> list[float]:
    """The weight of each step. Raises ConfigError for weights that are no mean of these steps."""
    if (form == "weights") != bool(given):
        raise ConfigError(
            f"--form is {form}, and --weights {'is' if given else 'is not'} given",
            fix="--weights is for --form weights alone, which needs it",
        )
    if given is None:
        from forge.plugins.merge.weights import weights_of  # imports NumPy

        return weights_of(form, steps)
    shown = f"--weights is {','.join(map(str, given))}"
    if len(given) != len(steps):
        raise ConfigError(
            f"{shown}: {len(given)} weights for {len(steps)} checkpoints, of steps"
            f" {', '.join(map(str, steps))}",
            fix="name the steps: --steps; and give one weight for each, in the order of steps",
        )
    if min(given) <= 0 or sum(given) != 1:
        raise ConfigError(
            f"{shown}: the sum is {float(sum(given)):.6g}, the smallest {float(min(given)):.6g}",
            fix="give positive numbers whose sum is exactly 1, such as 0.2,0.3,0.5 or 1/3,1/3,1/3",
        )
    return [float(one) for one in given]
