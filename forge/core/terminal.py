"""Output for people: messages, tables, progress, durations; colors and bars only on a terminal.

Lines in log files start with the time; those on a terminal do not.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import stat
import sys
import textwrap
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, tzinfo
from typing import IO, TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import rich.text

PLAIN_EVERY_SEC = 5.0
CLEAR_LINE = "\r\x1b[2K"
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


# --- messages --------------------------------------------------------------------------------------

# The time at the start of a line in a log, local and in seconds; the line that names its zone.
_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?: |$)")
_ZONE = re.compile(r"times are local, ([+-]\d\d:\d\d) ")

_copies: list[IO[str]] = []
# The time zone that this process has named in a log, by the device and the number of the file.
_zones: dict[tuple[int, int], str] = {}


def copy_to(file: IO[str]) -> None:
    """Write all messages from now on to `file` as well."""
    _copies.append(file)


def say(message: str) -> None:
    """Print a message to standard error; standard output is for data."""
    for file in (sys.stderr, *_copies):
        write(message, file)


@functools.cache
def say_once(message: str) -> None:
    """Print a message as `say` does, once in a process: for what several steps of a command find out."""
    say(message)


def show(line: str) -> None:
    """Print a line of results to standard output, and to the log if there is one."""
    print(line, flush=True)  # at once, also into a file: the next line may take an hour
    for file in _copies:
        write(line, file)


def write(message: str, file: IO[str]) -> None:
    """Print a message to a stream, each line with the time where the stream is a file.

    A message that cannot be written (log on a full disk, closed pipe) is dropped without an error.
    """
    with contextlib.suppress(OSError):
        print(stamped(visible(message), file), file=file, flush=True)


def begin_log(file: IO[str]) -> None:
    """Name the time zone before the next line that this process writes into a log."""
    if log := _log_of(file):
        _zones[log] = ""


def is_log(file: IO[str]) -> bool:
    """Return whether lines in this stream start with the time: in a regular file, and not on a terminal
    or in a pipe, whose reader sees when they come."""
    return _log_of(file) is not None


def _log_of(file: IO[str]) -> tuple[int, int] | None:
    try:
        status = os.fstat(file.fileno())
    except OSError:  # not a stream of the system
        return None
    return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else None


def stamped(text: str, file: IO[str]) -> str:
    """The text as it is written to this stream: each of its lines after the time, if it is a log.
    Lines of another log, such as that of a failed job, keep theirs."""
    if not (log := _log_of(file)):
        return text
    now, lines = datetime.now().astimezone(), text.split("\n")
    stamp, zone = now.isoformat(timespec="seconds")[:19], now.isoformat()[-6:]
    if _zones.get(log, zone) != zone:  # at the start, and when summer time begins or ends
        lines.insert(0, f"times are local, {zone} ({now.tzname()})")
        _zones[log] = zone
    return "\n".join(line if _STAMP.match(line) else f"{stamp} {line}".rstrip() for line in lines)


def unstamped(line: str, zone: tzinfo | None = None) -> tuple[float | None, str]:
    """The time of a line in a log, in seconds since the epoch, and its text. (None, line) for a line
    that is not of Forge. zone: that of the times; None for this machine's."""
    if match := _STAMP.match(line):
        with contextlib.suppress(ValueError, OverflowError):  # no time of Forge
            then = datetime.fromisoformat(match[1]).replace(tzinfo=zone)
            return then.timestamp(), line[match.end() :]
    return None, line


def dated(lines: Iterable[str]) -> tuple[list[float | None], list[str]]:
    """The time of each line of a log, None where it has none, and its text. Times are in the zone that
    the log names before them."""
    times, texts, zone = [], [], None
    for line in lines:
        time_of_line, text = unstamped(line, zone)
        if named := _ZONE.match(text):
            with contextlib.suppress(ValueError):  # no zone of Forge
                zone = datetime.fromisoformat(f"2000-01-01T00:00:00{named[1]}").tzinfo
            time_of_line, _ = unstamped(line, zone)
        times.append(time_of_line)
        texts.append(text)
    return times, texts


def visible(text: str) -> str:
    r"""Text with its control characters as escapes, such as \x1b; line breaks and tabs stay.

    All output for people goes through it: names of files and tensors, and lines of logs, may be those of
    strangers, and would drive the reader's terminal.
    """
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


def is_terminal(stream: IO[str]) -> bool:
    """Return whether the stream is a terminal that can move the cursor and show colors."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


# --- lines and tables on standard output -----------------------------------------------------------


def print_plain(text: str, end: str = "\n") -> None:
    """Print text to standard output. Characters that its encoding lacks are escaped, so that a sample or
    a log never ends in a UnicodeEncodeError."""
    encoding = sys.stdout.encoding or "utf-8"
    print(visible(text).encode(encoding, "backslashreplace").decode(encoding), end=end, flush=True)


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
    left_out: bool = False
    """Columns that do not fit are named below the table, instead of standing below each row."""
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
        """Columns that do not fit into the width are below their row, each with its head, or left out."""
        widths = self._widths(width)
        yield from self._row(dict(zip(self.heads, self.heads, strict=True)), _ALL_DIM, widths)
        for cells, styles in self.rows:
            named = dict(zip(self.heads, cells, strict=True))
            yield from self._row(named, styles, widths)
            if self.left_out:
                continue
            below = {head: cell for head, cell in named.items() if cell and head not in widths}
            short = "  ".join(f"{h}: {c}" for h, c in below.items() if h not in self.wrapped)
            long = [f"{head}: {cell}" for head, cell in below.items() if head in self.wrapped]
            for text in filter(None, (short, *long)):
                for line in _wrap(text, (width or 0) - _INDENT):
                    yield [(" " * _INDENT + line, "")]
        if self.left_out and (names := [head for head in self.heads if head not in widths]):
            for line in _wrap(f"not shown at this width: {', '.join(names)}", width or 0):
                yield [(line, "dim")]

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


def hours(number: float) -> str:
    """Hours with three digits, or all of the whole number; 0 below 0.005."""
    return f"{number:,.0f}" if number >= 99.95 else f"{round(number, 2):.3g}"


def gpu_and_node_hours(gpus: float | None, nodes: float) -> str:
    """`384 GPU-hours (96 node-hours)`; None, without GPUs: `96 node-hours`."""
    of_nodes = f"{hours(nodes)} node-hours"
    return of_nodes if gpus is None else f"{hours(gpus)} GPU-hours ({of_nodes})"


def without_passwords(text: str) -> str:
    """The text with `user:…@` in each URL: libraries name addresses in full."""
    return re.sub(r"(://[^\s/:@]*):[^\s/@]+@", r"\1:…@", text)
