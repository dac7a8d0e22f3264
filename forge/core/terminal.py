"""Output for people: lines, progress (a bar on a terminal, plain lines in a log), durations."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Protocol

PLAIN_EVERY_SEC = 5.0


class Progress(Protocol):
    def __call__(self, done: float, note: str = "") -> None:
        """Say how much is done (in the units of the total), with a short note."""


_copies: list[IO[str]] = []


def copy_to(file: IO[str]) -> None:
    """From now on write every line also to `file` (a log)."""
    _copies.append(file)


def say(message: str) -> None:
    """One line for a person, on standard error so that standard output stays data.

    A line that cannot be written (disk of a log full, reader gone) never ends the work it tells of.
    """
    for file in (sys.stderr, *_copies):
        with contextlib.suppress(OSError):
            print(message, file=file, flush=True)


def is_terminal() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


@contextmanager
def progress(label: str, total: float, unit: str) -> Iterator[Progress]:
    """A reporter for work of `total` units: a bar on a terminal, else a line every 5 s.

    rich honours NO_COLOR by itself.
    """
    if is_terminal():
        with _bar(label, total, unit) as update:
            yield update
    else:
        yield _plain(label, total, unit)


@contextmanager
def _bar(label: str, total: float, unit: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:.0f}/{task.total:.0f} {task.fields[unit]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(label, total=total, unit=unit, note="")

        def update(done: float, note: str = "") -> None:
            bars.update(task, completed=done, note=note)

        yield update


def _plain(label: str, total: float, unit: str) -> Progress:
    last = time.monotonic()

    def update(done: float, note: str = "") -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= PLAIN_EVERY_SEC:
            last = now
            say(f"{label}: {done:.0f}/{total:.0f} {unit} {note}".rstrip())

    return update


def duration(seconds: float) -> str:
    """`4 min`, `2 h 10 min`, `3 d 4 h`: the two largest units, no false precision."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, hours = whole // 60, whole // 3600
    if hours < 1:
        return f"{minutes} min"
    if hours < 24:
        return f"{hours} h {minutes % 60} min"
    return f"{hours // 24} d {hours % 24} h"
