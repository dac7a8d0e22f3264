"""One test of a promise about many cases: its message lists every case that breaks the promise."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import pytest


def failures(cases: Iterable[tuple[str, Any]], check: Callable[[Any], object]) -> list[str]:
    """`case: what is wrong` for each case whose check raises. No case at all is a failure, too."""
    found, num_cases = [], 0
    for name, value in cases:
        num_cases += 1
        printed = io.StringIO()
        try:
            # argparse prints why it exits
            with redirect_stdout(printed), redirect_stderr(printed):
                check(value)
        except (Exception, SystemExit, pytest.fail.Exception) as err:
            found.append(f"{name}: {_told(err, printed.getvalue())}")
    return found if num_cases else ["there is no case to check"]


def _told(err: BaseException, printed: str) -> str:
    """One line of what went wrong: pytest's own message, or the error with what was printed before it."""
    if isinstance(err, SystemExit):
        return f"exits with {err.code}: {printed.strip().rpartition(chr(10))[2]}"
    said = str(err).partition("\nassert ")[
        0
    ]  # without the values, where the assertion has a message
    text = " ".join(said.split()) or f"raised at line {_line(err)} of the check"
    return text if isinstance(err, AssertionError) else f"{type(err).__name__}: {text}"


def _line(err: BaseException) -> int:
    """Where it was raised."""
    at = err.__traceback__
    while at and at.tb_next:
        at = at.tb_next
    return at.tb_lineno if at else 0


def hold_for_each(cases: Iterable[tuple[str, Any]], check: Callable[[Any], object]) -> None:
    """Fails the test with a line for every case whose check raises."""
    __tracebackhide__ = True
    if found := failures(cases, check):
        pytest.fail("\n".join([f"{len(found)} cases fail:", *found]), pytrace=False)
