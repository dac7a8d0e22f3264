"""The last lines of a workflow command: how it stands with its runs, and what to do next."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from forge.core.paths import RunPaths
from forge.core.terminal import Table, print_plain
from forge.reporting.run_files import RunFiles
from forge.reporting.run_state import COLORS, RunState, ask_slurm, clipped, judge

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
