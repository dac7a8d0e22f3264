"""Output of a workflow command: a line when a job starts and when it is done, and at the end the runs.

In a file every line starts with the time, on a terminal only those about jobs.

Snakemake prints ten to twenty for each: files, reason, resources. They stay in its own log
(.snakemake/log), and on the terminal with --verbose and in a dry run. Errors, warnings, and all that is
not listed here are printed as Snakemake words them.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

from forge.core.paths import RunPaths
from forge.core.terminal import (
    CLEAR_LINE,
    Table,
    begin_log,
    is_log,
    is_terminal,
    print_plain,
    stamped,
)
from forge.reporting.run_files import RunFiles
from forge.reporting.run_state import COLORS, RunState, ask_slurm, clipped, judge

# Handler of Snakemake that writes to the terminal, or into Slurm's log of a job.
TERMINAL = "DefaultStreamHandler"
# What Snakemake and its executor plugin (2.8.0) say of their own work: how such lines begin.
OWN_WORK = (
    "Assuming unrestricted shared filesystem usage",
    "Building DAG of jobs",
    "Conda environments: ignored",
    "Group jobs: inactive",
    "SLURM run ID:",
    "Select jobs to execute",
    "Storing output in storage",
    "Using shell:",
)
_SUBMITTED = re.compile(r"Job (\S+) has been (submitted with SLURM jobid .*)")


def shorten(workflow: Any, logger: logging.Logger) -> None:
    """Print the jobs of this Snakemake in short, unless --verbose or -n asks for more. logger:
    Snakemake's. A second call changes nothing."""
    if workflow.output_settings.verbose or workflow.output_settings.dryrun:
        return
    for handler in list(logger.handlers):
        if isinstance(handler, logging.StreamHandler) and handler.name == TERMINAL:
            logger.removeHandler(handler)
            logger.addHandler(JobLines(handler))


class JobLines(logging.Handler):
    """Passes Snakemake's records to the handler that prints them: those about jobs as one line."""

    def __init__(self, printer: logging.StreamHandler[Any]) -> None:
        super().__init__()
        self._printer, self._is_log = printer, is_log(printer.stream)
        if self._is_log:
            begin_log(printer.stream)
            printer.setFormatter(_Stamped(printer.formatter, printer.stream))
        elif is_terminal(printer.stream):
            printer.setFormatter(_OverBars(printer.formatter, printer.stream))
        # By the id in Snakemake's records. Jobs of a group have the group's name.
        self._names: dict[str, str] = {}
        self._started: set[str] = set()
        self._ended: list[str] = []  # since the last count
        # By event of a record: the line in its place, "" for none, None for the record as it is.
        self._lines: dict[str | None, Callable[[Any], str | None]] = {
            None: self._without_event,
            "workflow_started": _versions,
            "run_info": _plan,
            "resources_info": _none,
            "job_started": _none,  # the scheduler's count of them, before each one's info
            "group_info": self._note_group,
            "job_info": self._start,
            "job_finished": self._note_end,
            "progress": self._count,
            "job_error": _error,
        }

    def emit(self, record: logging.LogRecord) -> None:
        line_of = self._lines.get(getattr(record, "event", None), _as_it_is)
        text = line_of(record)  # of each: a line may name a job whose start --quiet leaves out
        if not self._printer.filter(record):
            return
        if text is None:
            self._printer.handle(record)
        elif text:
            line = {"levelno": logging.INFO, "levelname": "INFO", "msg": text}
            self._printer.handle(logging.makeLogRecord(line))

    def _note_group(self, record: Any) -> str:
        # Its jobs are submitted under the uuid() of one of them.
        ids = (str(key) for job in record.jobs for key in (job.jobid, job.uuid()))
        self._names |= dict.fromkeys(ids, record.group_id)
        return ""

    def _start(self, record: Any) -> str:
        if record.indent:  # of a group
            return ""
        name = " ".join([record.rule_name, *map(str, record.wildcards.values())])
        self._names[str(record.jobid)] = name
        # The others are waiting in Slurm's queue: the plugin says when they are submitted.
        return self._line(name, "started") if record.local else ""

    def _line(self, name: str, what: str) -> str:
        self._started.add(name)
        return self._dated(f"{name}: {what}")

    def _dated(self, line: str) -> str:
        return line if self._is_log else time.strftime("[%Y-%m-%d %H:%M:%S] ") + line

    def _without_event(self, record: logging.LogRecord) -> str | None:
        if record.levelno != logging.INFO:
            return None
        said = record.getMessage()
        if submitted := _SUBMITTED.match(said):
            return self._line(self._names.get(submitted[1], f"job {submitted[1]}"), submitted[2])
        return "" if said.startswith(OWN_WORK) or hasattr(record, "quietness") else None

    def _note_end(self, record: Any) -> str:
        self._ended.append(self._names.get(str(record.job_id), ""))
        return ""

    def _count(self, record: Any) -> str:
        """A line for what has ended since the last count. Nothing of what has not started here: the
        Snakemake of a Slurm job starts one more, which says it."""
        names = [name for name in dict.fromkeys(self._ended) if name in self._started]
        self._ended.clear()
        done = f"done ({record.done} of {record.total})"
        return self._dated(f"{', '.join(names)}: {done}") if names else ""


class _ForStream(logging.Formatter):
    """Another formatter's lines, changed for a stream."""

    def __init__(self, formatter: logging.Formatter | None, stream: IO[str]) -> None:
        super().__init__()
        self._formatter, self._stream = formatter or logging.Formatter(), stream

    def format(self, record: logging.LogRecord) -> str:
        text = self._formatter.format(record)
        return self._change(str(text)) if text else ""

    def _change(self, text: str) -> str:
        raise NotImplementedError


class _Stamped(_ForStream):
    """With the time as in other files of Forge."""

    def _change(self, text: str) -> str:
        return stamped(text, self._stream)


class _OverBars(_ForStream):
    """In place of the progress bar of a job, which draws it anew on the next line: else the bar as it
    was stays on the terminal."""

    def _change(self, text: str) -> str:
        return f"{CLEAR_LINE}{text}"


def _versions(record: Any) -> str:
    python = record.python_version.split()[0]
    return f"Snakemake {record.snakemake_version}, Python {python} on {record.host}"


def _plan(record: Any) -> str:
    rules = [(rule, count) for rule, count in record.stats.items() if rule != "total"]
    names = (rule if count == 1 else f"{count} {rule}" for rule, count in rules)
    return f"jobs to run: {record.stats['total']} ({', '.join(names)})"


def _error(record: Any) -> str | None:
    # Of each job of a group, also of those that did not fail; its own error has the logs of all.
    return "" if record.indent else None


def _none(_: Any) -> str:
    return ""


def _as_it_is(_: Any) -> None:
    return None


# With more runs than these, those that need nobody are counted, and equal rows are one.
MAX_ROWS = 8
MAX_NEXT = 120
_HEADS = ("run", "state", "reason", "log", "next")


def print_end(runs: Sequence[RunPaths]) -> None:
    """Print a table of these runs to standard output."""
    queue, note = ask_slurm(runs)
    states = [judge(RunFiles(paths), queue) for paths in runs]
    shown = states if len(states) <= MAX_ROWS else [state for state in states if state.next]
    table = Table(_HEADS, wrapped=_HEADS[2:])
    for names, state in _rows(shown):
        table.add(_cells(names, state), {"run": "bold", "state": COLORS[state.tone]})
    print_plain("")
    if shown:
        table.print()
    if quiet := Counter(state.state for state in states if state not in shown):
        counts = ", ".join(f"{number} {state}" for state, number in quiet.items())
        print_plain(f"{quiet.total()} of {len(states)} runs need nothing: {counts}")
    if note and any(state.job and state.tone != "good" for state in states):
        print_plain(note)  # elsewhere no job of Slurm is known that could change the table


def _rows(states: Sequence[RunState]) -> Iterator[tuple[str, RunState]]:
    """Each state with its run's name; of many runs, those with the same state and reason as one."""
    groups: dict[tuple[str, ...], list[RunState]] = defaultdict(list)
    for state in states:
        same = (state.state, state.reason)
        groups[same if len(states) > MAX_ROWS else (state.run,)].append(state)
    for first, *others in groups.values():
        yield first.run + (f" (and {len(others)} more)" if others else ""), first


def _cells(names: str, state: RunState) -> list[str]:
    at = f" at step {state.step}" if state.step and state.tone != "good" else ""
    log = str(state.log) if state.log else ""
    return [names, state.state + at, clipped(state.reason), log, clipped(state.next, MAX_NEXT)]
