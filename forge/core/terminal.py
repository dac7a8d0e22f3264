"""Output for people: messages, tables, progress, durations; colors and bars only on a terminal."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import textwrap
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import rich.text

PLAIN_EVERY_SEC = 5.0
# Characters that drive a terminal, or turn the direction of what follows; not \n and \t.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
# In tables: text and its style; smallest width of a column of text; indent of what does not fit into a
# row.
_Piece = tuple[str, str]
_LEAST_TEXT, _INDENT = 16, 4
_ALL_DIM: Mapping[str, str] = defaultdict(lambda: "dim")
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
    text = visible(message)
    for file in (sys.stderr, *_copies):
        with contextlib.suppress(OSError):
            print(text, file=file, flush=True)


def visible(text: str) -> str:
    r"""Text with its control characters as escapes, such as \x1b; line breaks and tabs stay.

    All output for people goes through it: names of files and tensors, and lines of logs, may be those of
    strangers, and would drive the reader's terminal.
    """
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


def is_terminal(stream: IO[str]) -> bool:
    """Whether the stream is a terminal that can move the cursor and show colors."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


# --- lines and tables on standard output -----------------------------------------------------------


def print_plain(text: str) -> None:
    """Print text to standard output. Characters that its encoding lacks are escaped, so that a sample or
    a log never ends in a UnicodeEncodeError."""
    encoding = sys.stdout.encoding or "utf-8"
    print(visible(text).encode(encoding, "backslashreplace").decode(encoding), flush=True)


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
        self.rows.append(([visible(cell) for cell in cells], styles))

    def print(self) -> None:
        """Print the table to standard output."""
        if is_terminal(sys.stdout):
            from rich.console import Console

            Console().print(self.drawn(), soft_wrap=True)
        else:
            print_plain("\n".join("".join(text for text, _ in line) for line in self._lines()))

    def drawn(self) -> rich.text.Text:
        """The table as a text of rich, which honors NO_COLOR, as wide as the terminal at most."""
        from rich.console import Console
        from rich.text import Text

        lines = (Text.assemble(*line) for line in self._lines(Console().width))
        return Text("\n", no_wrap=True).join(lines)

    def _lines(self, width: int | None = None) -> Iterator[list[_Piece]]:
        """Columns that do not fit into the width are below their row, each with its head."""
        widths = self._widths(width)
        yield from self._row(dict(zip(self.heads, self.heads, strict=True)), _ALL_DIM, widths)
        for cells, styles in self.rows:
            named = dict(zip(self.heads, cells, strict=True))
            yield from self._row(named, styles, widths)
            below = {head: cell for head, cell in named.items() if cell and head not in widths}
            short = "  ".join(f"{h}: {c}" for h, c in below.items() if h not in self.wrapped)
            long = [f"{head}: {cell}" for head, cell in below.items() if head in self.wrapped]
            for text in filter(None, (short, *long)):
                for line in _wrap(text, (width or 0) - _INDENT):
                    yield [(" " * _INDENT + line, "")]

    def _widths(self, width: int | None) -> dict[str, int]:
        """The width of each column that stands in the lines of rows."""
        cells = zip(self.heads, *(cells for cells, _ in self.rows), strict=True)
        columns = dict(zip(self.heads, cells, strict=True))
        natural = {head: max(map(len, column)) for head, column in columns.items()}
        if width is None or _total(natural) <= width:
            return natural
        widths = dict(natural)
        for head in self.wrapped:
            longest = max(len(word) for cell in columns[head] for word in [*cell.split(), ""])
            widths[head] = min(natural[head], max(_LEAST_TEXT, longest))
        others = [head for head in self.heads if head not in self.wrapped]
        for head in (*reversed(self.wrapped), *reversed(others[1:])):
            if _total(widths) > width:
                del widths[head]
        for head in reversed(widths):  # what is left goes to the last column first
            widths[head] += min(natural[head] - widths[head], width - _total(widths))
        return widths

    def _row(
        self, cells: Mapping[str, str], styles: Mapping[str, str], widths: Mapping[str, int]
    ) -> Iterator[list[_Piece]]:
        columns = {head: _wrap(cells[head], max(width, 1)) for head, width in widths.items()}
        for number in range(max(map(len, columns.values()))):
            line: list[_Piece] = []
            for head, parts in columns.items():
                text = parts[number] if number < len(parts) else ""
                width = widths[head]
                padded = text.rjust(width) if head in self.numbers else text.ljust(width)
                line += [(padded, styles.get(head, "")), ("  ", "")]
            while line and not line[-1][0].strip():
                line.pop()
            if line:
                line[-1] = (line[-1][0].rstrip(), line[-1][1])
            yield line


def _total(widths: Mapping[str, int]) -> int:
    return sum(widths.values()) + 2 * (len(widths) - 1)


def _wrap(text: str, width: int) -> list[str]:
    """Lines of at most this width; a longer word is broken."""
    if len(text) <= width:
        return [text]
    return textwrap.wrap(text, max(width, 1), break_on_hyphens=False) or [""]


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
        TextColumn("{task.description}", style="bold", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:.0f}/{task.total:.0f} {task.fields[unit]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(visible(label), total=total, unit=unit, note="")

        def update(done: float, note: str = "") -> None:
            bars.update(task, completed=done, note=visible(note))

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
