"""`forge logs`: what the ranks and their launcher printed, errors first."""

from __future__ import annotations

import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from forge.core import events
from forge.core.errors import ConfigError
from forge.core.json_lines import Follower, first_lines, last_lines
from forge.core.paths import RunPaths
from forge.core.terminal import dated, is_terminal, print_plain, visible
from forge.launch.rank_records import NO_RECORD
from forge.reporting.log_errors import (
    SEARCHED_BYTES,
    Group,
    LoggedError,
    clean,
    find,
    group,
    last_error,
    said,
)
from forge.run.launches import LaunchHistory, launches_of

# Errors are searched in the end of each log: a rank mostly dies of the last that it says. Of a
# thousand ranks' logs so much less of each that the answer comes within seconds.
SEARCHED_ALL_BYTES, SEARCHED_LEAST_BYTES = 2**25, 2**16
HEAD_BYTES = 2**12  # of the begin of a log, which has the first time
MAX_GROUPS = 8
MAX_BLOCK = 14  # lines shown of one error
MAX_WIDTH = 400  # of one line
MAX_ECHO = 120
FOLLOW_EVERY_SEC = 0.5
ALL = "all"

_NAME = re.compile(
    r"(?P<start>\d+\.\d+|local\.[^.]+)\.(?:(?P<node>[^.]+)\.(?P<rank>\d+)|(?P<launcher>[^.]+))\.log"
)


@dataclass(frozen=True)
class Log:
    """A log of one rank, of a launcher (rank None), or of a subcommand (start "")."""

    path: Path
    start: str
    who: str
    rank: int | None
    node: str
    written: float  # seconds since the epoch


@dataclass(frozen=True)
class LaunchLogs:
    """One start of the ranks: `{job}.{restart}`, or local and the launch. Its logs, rank 0 first."""

    name: str
    logs: tuple[Log, ...]

    @cached_property
    def began(self) -> float:
        """Time at which its first rank began; approximate if no line of that rank's log has the time."""
        times, _ = dated(first_lines(self.logs[0].path, HEAD_BYTES))
        return next(filter(None, times), min(log.written for log in self.logs))

    @property
    def nodes(self) -> list[str]:
        return sorted({log.node for log in self.logs if log.node})

    @property
    def ranks(self) -> list[Log]:
        return [log for log in self.logs if log.rank is not None]


def logs(
    paths: RunPaths,
    *,
    rank: int | None = None,
    restart: str | None = None,
    lines: int = 20,
    follow: bool = False,
) -> None:
    """Print errors, then the last `lines` of rank 0, of the launcher and of a rank without a record, to
    standard output.

    rank: that rank's log instead. restart: the name of a start, the number of a restart of the last
    job, or "all"; the last start when None. follow: then print what is appended, until Ctrl-C.
    Raises ConfigError where there is nothing of it.
    """
    starts, commands = read_starts(paths)
    if not starts and not commands:
        raise ConfigError(
            f"{paths.logs} holds no logs yet",
            cause="the run waits in the queue, or was never started",
            fix=f"forge status {paths.root}   (Slurm's own words to a job: .snakemake/slurm_logs)",
        )
    chosen = choose(starts, restart) if starts else []
    if rank is not None:
        chosen = [_only(start, rank) for start in chosen]
    # Before the first look: a line that is written meanwhile is shown twice rather than never.
    following = _Following(paths, rank) if follow else None
    view = _View(_Screen(), paths, starts, commands, lines)
    for start in chosen:
        view.show(start, with_errors=rank is None)
    if not chosen:
        view.show_subcommands()
    if following:
        following.print_until_interrupted(view.screen)
    elif chosen:
        view.show_more(chosen[-1])


# --- which logs ----------------------------------------------------------------------------------


def read_starts(paths: RunPaths) -> tuple[list[LaunchLogs], list[Log]]:
    """The run's starts and the logs of its subcommands, each the oldest first."""
    by_start, commands = defaultdict(list), []
    # Not glob, which takes a directory that may not be read for an empty one.
    there = paths.logs.iterdir() if paths.logs.is_dir() else ()
    for path in there:
        if path.suffix != ".log":
            continue
        log = _log(path)
        if log.start:
            by_start[log.start].append(log)
        else:
            commands.append(log)
    starts = [
        LaunchLogs(
            name, tuple(sorted(of_start, key=lambda log: (log.rank is None, log.rank, log.who)))
        )
        for name, of_start in by_start.items()
    ]
    return sorted(starts, key=lambda s: s.began), sorted(commands, key=lambda log: log.written)


def _log(path: Path) -> Log:
    written, match = path.stat().st_mtime, _NAME.fullmatch(path.name)
    if not match:
        return Log(path, "", path.name, None, "", written)
    if match["launcher"]:
        return Log(path, match["start"], match["launcher"], None, "", written)
    rank = int(match["rank"])
    return Log(path, match["start"], f"rank {rank}", rank, match["node"], written)


def choose(starts: Sequence[LaunchLogs], wanted: str | None) -> list[LaunchLogs]:
    """The starts that `--restart` names. Raises ConfigError that lists what there is."""
    if wanted is None:
        return list(starts[-1:])
    if wanted == ALL:
        return list(starts)
    # The same number in two jobs: the last one is meant. Local launches have their place in line.
    last = [s for s in starts if s.name.endswith(f".{wanted}") and not s.name.startswith("local.")]
    local = [s for s in starts if s.name.startswith("local.")]
    named = [s for s in starts if s.name == wanted]
    if wanted.isdigit() and int(wanted) < len(local) and not last:
        named = named or [local[int(wanted)]]
    if not (chosen := named or last[-1:]):
        raise ConfigError(
            f"no start {wanted} of this run", fix=f"there are: {', '.join(s.name for s in starts)}"
        )
    return chosen


def _only(start: LaunchLogs, rank: int) -> LaunchLogs:
    """The start with the log of one rank alone. Raises ConfigError."""
    of_rank = tuple(log for log in start.logs if log.rank == rank)
    if not of_rank:
        there = [str(log.rank) for log in start.ranks]
        listed = there if len(there) <= 4 else [*there[:2], "…", there[-1]]
        raise ConfigError(
            f"start {start.name} has no log of rank {rank}",
            cause="it was not started, or ended before its first line",
            fix=f"ranks with a log: {', '.join(listed) or 'none'}",
        )
    return LaunchLogs(start.name, of_rank)


# --- errors --------------------------------------------------------------------------------------


def errors_of(paths: RunPaths, start: LaunchLogs, commands: Sequence[Log]) -> list[Group]:
    """The errors of a start: from its logs, the event log, and the last words of `commands`."""
    share = _searched_bytes(start)
    errors = [error for log in start.logs for error in _errors_in(log, share)]
    # A rank's record repeats its log, which has more of it, or is the only place that tells its error.
    seen = {(error.who, error.kind) for error in errors}
    launches = _launches(paths, start)
    errors += [error for error in _of_ranks(launches) if (error.who, error.kind) not in seen]
    # So do the outcome, and the end of a subcommand's log.
    for more in (
        _of_outcome(launches, start),
        [error for error in _last_errors(commands) if error.time >= start.began],
    ):
        known = {error.kind for error in errors}
        errors += [error for error in more if error.kind not in known]
    return group(errors)


def _of_ranks(launches: Iterable[LaunchHistory]) -> Iterator[LoggedError]:
    """Messages that ranks have recorded."""
    for event in _rank_errors(launches):
        if event.message != NO_RECORD:
            lines = tuple(clean(event.message.splitlines()))
            for rank in event.ranks:
                yield LoggedError(lines, event.time, f"rank {rank}", event.host)


def _rank_errors(launches: Iterable[LaunchHistory]) -> Iterator[events.RankError]:
    return (e for launch in launches for e in launch.log if isinstance(e, events.RankError))


def _of_outcome(launches: Iterable[LaunchHistory], start: LaunchLogs) -> Iterator[LoggedError]:
    """The failure of the launches, or the loss of ranks."""
    node_of = {log.who: log.node for log in start.logs}
    for end in (end for launch in launches for end in launch.ends):
        if end.is_failure:
            lines = tuple(clean(end.text.splitlines()))
            yield LoggedError(lines, end.time, end.who, node_of.get(end.who, ""))


def _searched_bytes(start: LaunchLogs) -> int:
    share = SEARCHED_ALL_BYTES // len(start.logs)
    return max(SEARCHED_LEAST_BYTES, min(SEARCHED_BYTES, share))


def _errors_in(log: Log, num_bytes: int) -> Iterator[LoggedError]:
    lines, _ = last_lines(log.path, num_bytes)
    yield from find(clean(lines), log.who, written=log.written, node=log.node)


def _last_errors(commands: Sequence[Log]) -> list[LoggedError]:
    return [error for log in commands if (error := last_error(log.path))]


def _launches(paths: RunPaths, start: LaunchLogs) -> list[LaunchHistory]:
    """The launches of this start: several where ranks were lost."""
    launches = launches_of(events.read(paths.events))
    return [one for one in launches if one.begun and one.begun.log_prefix == start.name]


# --- on the screen ---------------------------------------------------------------------------------


class _Screen:
    """Lines on standard output: colored on a terminal, plain elsewhere. rich honors NO_COLOR."""

    def __init__(self) -> None:
        self.line: Callable[..., None] = self._plain
        if is_terminal(sys.stdout):
            from rich.console import Console

            self._console = Console(highlight=False, soft_wrap=True)
            self.line = self._colored

    def _colored(self, text: str = "", style: str = "") -> None:
        self._console.print(visible(text), style=style, markup=False)

    def _plain(self, text: str = "", style: str = "") -> None:
        print_plain(text)


@dataclass(frozen=True)
class _View:
    """A run's logs, and how they are printed."""

    screen: _Screen
    paths: RunPaths
    starts: Sequence[LaunchLogs]
    commands: Sequence[Log]
    lines: int

    def show(self, start: LaunchLogs, *, with_errors: bool) -> None:
        is_last = start.name == self.starts[-1].name
        ranks = f"{len(start.ranks)} rank{'' if len(start.ranks) == 1 else 's'}"
        self.screen.line(
            f"{self.paths.root}: start {start.name} ({'last' if is_last else 'earlier'} of"
            f" {len(self.starts)}), {ranks} on {_few(start.nodes) or 'no node'}",
            "bold",
        )
        launches = _launches(self.paths, start)
        for end in (end for launch in launches for end in launch.ends):
            if end.saved_step is not None:
                why = f": {end.reason}" if end.reason else ""
                at = f"{end.words} at step {end.saved_step}{why}"
                self.screen.line(f"{at}, {clock(end.time)}")
        shown = start.logs
        if with_errors:
            self.show_errors(errors_of(self.paths, start, self.commands if is_last else ()))
            share = _searched_bytes(start)
            if any(log.path.stat().st_size > share for log in start.logs):
                self.screen.line(f"  (searched: the last {share // 2**10} KiB of each log)", "dim")
            shown = self._telling(start)
        for log in shown:
            self.show_tail(log)

    def _telling(self, start: LaunchLogs) -> tuple[Log, ...]:
        """The logs of rank 0, of the launcher, and of the first rank that has ended without a record."""
        silent = [
            event.ranks[0]
            for event in _rank_errors(_launches(self.paths, start))
            if event.message == NO_RECORD
        ]
        ranks = (None, start.ranks[0].rank if start.ranks else 0, *silent[-1:])
        return tuple(log for log in start.logs if log.rank in ranks)

    def show_subcommands(self) -> None:
        """Before the first rank: what the subcommands said."""
        names = ", ".join(log.who for log in self.commands)
        self.screen.line(f"{self.paths.root}: no rank has started yet; {names}", "bold")
        self.show_errors(group(_last_errors(self.commands)))
        self.show_tail(self.commands[-1])

    def show_errors(self, groups: Sequence[Group]) -> None:
        causes = [errors for errors in groups if not errors.first.is_echo]
        echoes = [errors for errors in groups if errors.first.is_echo]
        many = f"{len(causes)} errors, the earliest first" if len(causes) > 1 else "1 error"
        self.screen.line()
        self.screen.line(many if causes else "no errors" + " of their own" * bool(echoes), "bold")
        for errors in causes[:MAX_GROUPS]:
            self.screen.line()
            self.screen.line(f"  {_title(errors)}", "bold red")
            for line in _shortened(errors.fullest):
                self.screen.line(f"    {line}", "red")
        if len(causes) > MAX_GROUPS:
            self.screen.line(f"\n  and {len(causes) - MAX_GROUPS} more that came later")
        if echoes:
            self.screen.line("\n  said because processes were ended:")
        for errors in echoes[:MAX_GROUPS]:
            self.screen.line(f"    {_title(errors)}: {said(errors.first.headline)[:MAX_ECHO]}")

    def show_tail(self, log: Log) -> None:
        words, cut = last_lines(log.path, max(SEARCHED_BYTES, self.lines * MAX_WIDTH))
        cut = cut or len(words) > self.lines
        who = f"{log.who} on {log.node}" if log.node else log.who
        shown = f"the last {self.lines} lines of {log.path}" if cut else str(log.path)
        when = f"last written {clock(log.written)}" if words else "has written nothing"
        self.screen.line()
        self.screen.line(f"{who}, {when}: {shown}", "bold")
        rows = list(zip(*dated(clean(words)), strict=True))
        for time_of_line, text in rows[max(0, len(rows) - self.lines) :]:
            line = f"{clock(time_of_line)} {text}" if time_of_line else text
            self.screen.line(f"  {line}", "red" if _is_error(text) else "")

    def show_more(self, start: LaunchLogs) -> None:
        ways = ["--rank N", "--lines 200", "--follow"]
        if others := [s.name for s in self.starts if s.name != start.name]:
            ways.insert(1, f"--restart {others[-1]} (or all)")
        self.screen.line()
        self.screen.line(f"more: forge logs {self.paths.root} with {', '.join(ways)}", "dim")


def _title(errors: Group) -> str:
    often = (
        f", {len(errors.all)} times" if len(errors.all) > len({f.who for f in errors.all}) else ""
    )
    return f"{errors.title}, {clock(errors.first.time)}{often}"


def _shortened(error: LoggedError) -> list[str]:
    """The lines of an error that tell most: the end of a traceback, the head of a message."""
    lines = [line if len(line) <= MAX_WIDTH else line[:MAX_WIDTH] + "…" for line in error.lines]
    if len(lines) <= MAX_BLOCK:
        return lines
    if error.headline == error.lines[0]:
        return [*lines[:MAX_BLOCK], f"… {len(lines) - MAX_BLOCK} lines more"]
    return [lines[0], f"  … {len(lines) - MAX_BLOCK} lines", *lines[1 - MAX_BLOCK :]]


def _is_error(line: str) -> bool:
    return any(True for _ in find([line], "", written=0))


def _few(names: Sequence[str]) -> str:
    return " ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def clock(seconds: float) -> str:
    """A time for people: of today without the day."""
    then, now = time.localtime(seconds), time.localtime()
    same_day = then[:3] == now[:3]
    return time.strftime("%H:%M:%S" if same_day else "%Y-%m-%d %H:%M:%S", then)


# --- as it is written ------------------------------------------------------------------------------


class _Following:
    """Prints what is appended to the logs of the last start, and of starts that come."""

    def __init__(self, paths: RunPaths, rank: int | None) -> None:
        self._paths, self._rank = paths, rank
        self._followed: dict[Path, tuple[Log, Follower]] = {}
        self._start = self._look(from_start=False)

    def print_until_interrupted(self, screen: _Screen) -> None:
        try:
            while True:
                for log, follower in self._followed.values():
                    for line in dated(clean(follower.new_lines()))[1]:
                        screen.line(f"{log.who} | {line}", "red" if _is_error(line) else "")
                time.sleep(FOLLOW_EVERY_SEC)
                if (start := self._look(from_start=True)) != self._start:
                    self._start = start
                    screen.line(f"start {start}", "bold")
        except KeyboardInterrupt:
            screen.line()

    def _look(self, *, from_start: bool) -> str:
        """Find logs to follow, from their begin or from now on; the name of the last start.

        Those of subcommands are left out where ranks run: they repeat what rank 0 says.
        """
        starts, commands = read_starts(self._paths)
        logs = starts[-1].logs if starts else commands
        for log in logs:
            if log.path not in self._followed and self._rank in (None, log.rank):
                self._followed[log.path] = (
                    log,
                    Follower(log.path, 0 if from_start else log.path.stat().st_size),
                )
        return starts[-1].name if starts else ""
