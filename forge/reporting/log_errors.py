"""Find errors in log lines: which came first, and on how many ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import accumulate
from pathlib import Path

from forge.core.json_lines import last_lines
from forge.core.terminal import dated, one_line

SEARCHED_BYTES = 2**20  # of the end of a log
MAX_BLOCK = 400  # lines of one traceback: recursion errors are longer, and end the same way

# What launchers and torch put before a line: `[rank3]: `, and srun --label's `3: `.
_LABEL = re.compile(r"^(?:\[(?:default|rank)?\d+\]:\s?|\s*\d+: )")
_TRACEBACK = "Traceback (most recent call last):"
_CHAIN = re.compile(r"^(?:During handling of|The above exception was)")
_ERROR = re.compile(
    r"(?<!\bno )(?<!\b0 )(?<!\bwithout )\b(?:error|fatal|exception)\b|\w(?:error|exception):"
    r"|^\[?[EF]\d{4} \d\d:\d\d:\d\d"  # glog: torch's C++ and torchrun
    r"|signal \d+ \(SIG(?:KILL|SEGV|BUS|ABRT|FPE)\)"  # torchrun, of the rank that died
    r"|NCCL WARN|segmentation fault|bus error|out of memory|oom.?kill|core dumped|\baborted\b",
    re.IGNORECASE,
)
# How lines begin that may have such words: warnings, and settings that are named after errors.
_HARMLESS = re.compile(r"\s*warning\b|\[?[WI]\d{4} \d\d:\d\d:\d\d|\w+=", re.IGNORECASE)
# One of these words is in every line that _ERROR finds: ten times faster to look for.
_WORDS = [
    "error",
    "exception",
    "fatal",
    "warn",
    "fault",
    "memory",
    "oom",
    "dumped",
    "abort",
    "signal",
]
# What a rank or the launcher says because another rank has ended: seldom the cause.
_ECHO = re.compile(
    r"connection (?:reset|closed) by|closed by peer|peerfailed|rank \d+ failed|broken pipe"
    r"|exited with exit code|: terminated$|cancelled at \S+ \*\*\*|childfailederror|exitcode"
    r"|job step aborted|signalexception|sigterm|remote process exited|socket closed"
    r"|communicator was aborted",
    re.IGNORECASE,
)
_ISO = re.compile(r"\b(\d{4}-\d\d-\d\d)[T _](\d\d:\d\d:\d\d(?:[.,]\d+)?)")
_GLOG = re.compile(r"^\[?[EFWI](\d\d)(\d\d) (\d\d:\d\d:\d\d(?:\.\d+)?)")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
# How a subcommand's log ends when the subcommand has failed; a stop that was asked for is not an error.
_LAST_WORD = re.compile(
    r"^forge \w+: (?!.*(?: stopped at step |asks this run to stop|interrupted;"
    r"|; job \S+ resumes from step ))"
)
_GLOG_HEAD = re.compile(_GLOG.pattern + r"[^\]]*\] ")


@dataclass(frozen=True)
class LoggedError:
    """One error in one log. time: seconds since the epoch, at the latest."""

    lines: tuple[str, ...]
    time: float
    who: str  # such as "rank 3", "srun", "train.log"
    node: str = ""
    is_echo: bool = False

    @property
    def is_traceback(self) -> bool:
        return self.lines[0] == _TRACEBACK

    @property
    def headline(self) -> str:
        """The line that names the error: the last line of a traceback, with the exception."""
        if not self.is_traceback:
            return self.lines[0]
        return next(
            (line for line in reversed(self.lines) if line and not line.startswith(" ")),
            self.lines[-1],
        )

    @property
    def kind(self) -> str:
        """The headline without what differs between ranks: numbers, addresses, who says it."""
        text = without_command(self.headline)
        text = re.sub(r"^rank \d+: ", "", text)
        return re.sub(r"0x[0-9a-fA-F]+|\d+", "#", text)


def find(
    lines: Sequence[str], who: str, *, written: float, node: str = ""
) -> Iterator[LoggedError]:
    """The errors in a log's lines, in their order.

    written: when the log was last written. An error of a library has the time that its lines tell, or
    that of the next line of Forge; after the last of these `written`, since the error that ends a process
    is the last in its log.
    """
    times, texts = dated(lines)
    rest = [_LABEL.sub("", text) for text in texts]
    backward = accumulate(reversed(times), lambda after, own: own or after, initial=written)
    latest = list(backward)[::-1]
    at = 0
    while at < len(rest):
        if rest[at].startswith(_TRACEBACK):
            end = _end_of_traceback(rest, at)
        elif _tells_error(rest[at]):
            end = _end_of_indented(rest, at + 1)
        else:
            at += 1
            continue
        block = tuple(line.rstrip() for line in rest[at:end])
        error = LoggedError(block, times[at] or _time_in(block, latest[at]), who, node)
        yield replace(error, is_echo=bool(_ECHO.search(error.headline)))
        at = end


def last_error(log: Path) -> LoggedError | None:
    """The error that a subcommand's log ends with. The log has every start, so what is followed by
    something else has been overcome."""
    lines = clean(last_lines(log, SEARCHED_BYTES)[0])
    times, words = dated(lines)
    at = max((i for i, line in enumerate(words) if line.startswith("forge ")), default=-1)
    if at < 0 or not _LAST_WORD.match(words[at]):
        return None
    if any(line and not line.startswith(" ") for line in words[at + 1 :]):
        return None
    written = log.stat().st_mtime
    if "is a bug of Forge" in words[at]:
        return next(reversed(list(find(lines, log.name, written=written))), None)
    return LoggedError(tuple(words[at:]), times[at] or written, log.name)


def without_command(headline: str) -> str:
    """A headline without the `forge train: ` before it."""
    return re.sub(r"^forge \w+: ", "", headline)


def clean(lines: Sequence[str]) -> list[str]:
    """Lines without what would drive the reader's terminal, of each only what was left to be seen."""
    seen = (_ANSI.sub("", line.rstrip("\r").rpartition("\r")[2]).expandtabs(4) for line in lines)
    return [line.rstrip() if line.isprintable() else one_line(line).rstrip() for line in seen]


def _tells_error(line: str) -> bool:
    lower = line.lower()
    if not (any(word in lower for word in _WORDS) or _GLOG.match(line)):
        return False
    return bool(_ERROR.search(line)) and not _HARMLESS.match(line)


def _end_of_traceback(lines: Sequence[str], start: int) -> int:
    """Behind the exception's line, what is indented below it, and tracebacks chained to it."""
    end = _end_of_indented(lines, start + 1)  # the frames
    end = _end_of_indented(lines, end + 1)  # the exception, and its cause and fix
    following = end
    while following < len(lines) and not lines[following].strip():
        following += 1
    chained = following < len(lines) and _CHAIN.match(lines[following])
    if chained and following - start < MAX_BLOCK:
        following += 1
        while following < len(lines) and not lines[following].strip():
            following += 1
        if following < len(lines) and lines[following].startswith(_TRACEBACK):
            return _end_of_traceback(lines, following)
    return min(end, len(lines))


def _end_of_indented(lines: Sequence[str], at: int) -> int:
    while at < len(lines) and lines[at].startswith(" "):
        at += 1
    return at


def _time_in(block: Sequence[str], latest: float) -> float:
    """The time that the lines of a library tell, in this machine's time zone; `latest` without one."""
    for line in block:
        if iso := _ISO.search(line):
            text = f"{iso[1]} {iso[2].replace(',', '.')}"
        elif glog := _GLOG.match(line):  # no year: that of the file
            year = datetime.fromtimestamp(latest).year
            text = f"{year}-{glog[1]}-{glog[2]} {glog[3][:15]}"
        else:
            continue
        try:
            return datetime.fromisoformat(text[:26]).timestamp()
        except ValueError:
            continue
    return latest


def said(headline: str) -> str:
    """A headline without the time and source file that torch puts before it."""
    return _GLOG_HEAD.sub("", headline)


@dataclass(frozen=True)
class Group:
    """The same error, of one rank or of many; `all` in order of time."""

    all: tuple[LoggedError, ...]

    @property
    def first(self) -> LoggedError:
        return self.all[0]

    @property
    def fullest(self) -> LoggedError:
        """The error with the most lines."""
        return max(self.all, key=lambda error: len(error.lines))

    @property
    def title(self) -> str:
        """Place of the error: `rank 3 (and 63 more) on node02`. Ranks, if any rank had it."""
        had = [error for error in self.all if error.who.startswith("rank ")] or list(self.all)
        others = len({error.who for error in had}) - 1
        more = f" (and {others} more)" if others else ""
        return f"{had[0].who}{more}{f' on {had[0].node}' if had[0].node else ''}"


def group(errors: Iterable[LoggedError]) -> list[Group]:
    """Equal errors together. Earliest first, which mostly is the cause; those that only tell of
    another rank's end come last, since times of different logs are not exact enough to tell."""
    groups: dict[str, list[LoggedError]] = {}
    for error in sorted(errors, key=lambda error: (error.is_echo, error.time)):
        groups.setdefault(error.kind, []).append(error)
    return [Group(tuple(alike)) for alike in groups.values()]
