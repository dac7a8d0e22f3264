"""Subcommand `forge prompt`."""

from __future__ import annotations

import argparse
import math
import os
import sys
from typing import Any

from forge.commands.subcommands import Subcommands
from forge.core.errors import ConfigError
from forge.core.terminal import say

LARGEST_SEED = 2**63 - 1  # of torch's generators


def add_prompt(subcommands: Subcommands) -> None:
    """Add the subcommand."""
    parser = subcommands.plain(
        "prompt", _prompt, "continue a text with the last checkpoint of a run", keys=False
    )
    option = parser.add_argument
    option("run", metavar="RUN", help="name or directory of a run, a checkpoint or an export")
    option("text", metavar="TEXT", nargs="?", help="the prompt (default: standard input)")
    option("--max-tokens", type=int, default=100, metavar="N", help="tokens (default: 100)")
    option(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="0: always the most likely token (default: 0.8, of the 50 most likely ones)",
    )
    option("--seed", type=int, default=0, metavar="S", help="same seed, same text (default: 0)")
    option("--step", type=int, metavar="N", help="of the checkpoint (default: the last one)")
    option("--device", default="cpu", help="as torch names it, such as cuda (default: cpu)")
    option(
        "--data",
        metavar="DIR",
        type=os.path.expanduser,
        help="with the run's tokenizer (default: the project's)",
    )
    _take_text_behind_options(parser)


def _take_text_behind_options(parser: Any) -> None:
    """Let TEXT stand anywhere: argparse looks for one that may be left out only right behind RUN, up to
    Python 3.12 (https://github.com/python/cpython/issues/53780)."""
    parse = parser.parse_known_args

    def parse_known_args(words: Any, namespace: Any) -> tuple[argparse.Namespace, list[str]]:
        options, rest = parse(words, namespace)
        if options.text is None and rest and not rest[0].startswith("-"):
            options.text = rest.pop(0)
        return options, rest

    parser.parse_known_args = parse_known_args


def _prompt(options: argparse.Namespace) -> None:
    _check(options)
    text = _text() if options.text is None else options.text
    _check_text(text)
    from forge.plugins.prompt.prompt import prompt

    prompt(
        options.run,
        text,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        seed=options.seed,
        step=options.step,
        device=options.device,
        data=options.data,
    )


def _check(options: argparse.Namespace) -> None:
    """Raises ConfigError for a number that no text can be made with."""
    bounds = {
        "--max-tokens": (options.max_tokens, 1, math.inf),
        "--temperature": (options.temperature, 0, sys.float_info.max),
        "--seed": (options.seed, 0, LARGEST_SEED),
    }
    for name, (value, least, most) in bounds.items():
        if not least <= value <= most:  # also true for NaN
            limit = f"at most {most}" if value > most else f"a number, {least} or more"
            raise ConfigError(f"{name} is {value}, but must be {limit}", fix="correct it")


def _check_text(text: str) -> None:
    """Raises ConfigError for a prompt that no tokenizer can encode."""
    if not text:
        raise ConfigError(
            "the prompt is empty",
            fix='give at least one character, as TEXT or on standard input: forge prompt RUN "The "',
        )
    try:
        text.encode()
    except UnicodeEncodeError as err:
        raise ConfigError(
            f"the prompt is not UTF-8, from its character {err.start + 1} on",
            cause="text in another encoding, or a binary file",
            fix="convert it: iconv -f latin1 -t utf-8 FILE",
        ) from None


def _text() -> str:
    """Standard input, without the line break that ends its last line."""
    if sys.stdin.isatty():
        say("type the prompt, then Enter and Ctrl-D")
    return sys.stdin.read().removesuffix("\n")
