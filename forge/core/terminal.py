"""Output for people: messages, tables, progress, durations; colors and bars only on a terminal."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import rich.table

PLAIN_EVERY_SEC = 5.0
# Seconds and name of each unit, then of the smaller unit that shows the remainder.
_UNITS = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))


class Progress(Protocol):
    def __call__(self, done: float, note: str = "") -> None:
        """Show how much is done, in units of the total, with a short note."""


_copies: list[IO[str]] = []


def copy_to(file: IO[str]) -> None:
    """Write all messages from now on to `file` (a log) as well."""
    _copies.append(file)


def say(message: str) -> None:
    """Print a message to standard error; standard output is for data.

    A message that cannot be written (log on a full disk, closed pipe) is dropped without an error.
    """
    for file in (sys.stderr, *_copies):
        with contextlib.suppress(OSError):
            print(message, file=file, flush=True)


def is_terminal(stream: IO[str]) -> bool:
    """Whether the stream is a terminal that can move the cursor and show colors."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


# --- lines and tables on standard output -----------------------------------------------------------


def print_plain(text: str) -> None:
    """Print text to standard output. Characters that its encoding lacks are escaped, so that a sample or
    a log never ends in a UnicodeEncodeError."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def one_line(text: str) -> str:
    """Text as one printable line: breaks shown as ⏎, other control characters escaped.

    Unescaped, sampled bytes could drive the reader's terminal.
    """
    shown = (c if c.isprintable() else "⏎" if c == "\n" else repr(c)[1:-1] for c in text)
    return "".join(shown)


@dataclass
class Table:
    """A table, colored on a terminal and padded with blanks elsewhere."""

    heads: Sequence[str]
    numbers: Sequence[str] = ()
    """Heads of the right-aligned columns."""
    wrapped: Sequence[str] = ()
    """Heads of the columns that wrap on a narrow terminal."""
    rows: list[tuple[Sequence[str], Mapping[str, str]]] = field(default_factory=list)
    """The cells of each row, and styles of rich for some of them, by head."""

    def add(self, cells: Sequence[str], styles: Mapping[str, str]) -> None:
        self.rows.append((cells, styles))

    def print(self) -> None:
        """To standard output."""
        if is_terminal(sys.stdout):
            from rich.console import Console

            Console().print(self.drawn())
        else:
            print_plain("\n".join(self._lines()))

    def drawn(self) -> rich.table.Table:
        """As a table of rich, which honors NO_COLOR. Cells are Text: a message is no markup."""
        from rich.table import Table as Drawn
        from rich.text import Text

        table = Drawn(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for head in self.heads:
            wraps = head in self.wrapped
            table.add_column(
                head,
                justify="right" if head in self.numbers else "left",
                no_wrap=not wraps,
                overflow="fold" if wraps else "ellipsis",
            )
        for cells, styles in self.rows:
            named = zip(self.heads, cells, strict=True)
            table.add_row(*(Text(cell, styles.get(head, "")) for head, cell in named))
        return table

    def _lines(self) -> Iterator[str]:
        table = [self.heads, *(cells for cells, _ in self.rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for cells in table:
            padded = [
                cell.rjust(width) if head in self.numbers else cell.ljust(width)
                for cell, width, head in zip(cells, widths, self.heads, strict=True)
            ]
            yield "  ".join(padded).rstrip()


# --- progress --------------------------------------------------------------------------------------


@contextmanager
def progress(label: str, total: float, unit: str) -> Iterator[Progress]:
    """Show the progress of `total` units: a bar on a terminal (rich honors NO_COLOR), else a line every
    5 s."""
    if is_terminal(sys.stderr):
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


# --- durations -------------------------------------------------------------------------------------


def duration(seconds: float, *, precise: bool = False) -> str:
    """`48 s`, `4 min`, `2 h 10 min`, `3 d 4 h`: for a duration that still grows.

    precise: for one that was measured, `0.42 s`, `3 min 20 s`, and `2 h` instead of `2 h 0 min`.
    """
    if precise and seconds < 9.95:
        return f"{seconds:.2g} s" if seconds < 0.995 else f"{seconds:.1f} s"
    whole = max(0, round(seconds))
    for size, unit, below, sub in _UNITS:
        if whole >= size:
            rest = whole % size // below
            alone = rest == 0 if precise else sub == "s"
            return f"{whole // size} {unit}" if alone else f"{whole // size} {unit} {rest} {sub}"
    return f"{whole} s"
