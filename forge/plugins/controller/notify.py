"""Tells a program of the user's how runs end, and when one needs a person."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from forge.core import events
from forge.core.events import Event
from forge.core.paths import RunPaths
from forge.core.terminal import say
from forge.reporting.log_errors import last_error
from forge.reporting.run_files import RunFiles
from forge.reporting.run_state import RunState, ask_slurm, judge

LIMIT_SEC = 30.0
# No later launch of this controller changes them.
FINAL = ("validated", "failed", "invalid")
# A person may have to act although a job waits or runs: it is held, it makes no steps.
_MAY_NEED = ("waiting", "running", "suspended")


def states_of(runs: Mapping[str, str], since: float = 0.0) -> list[RunState]:
    """The states of these runs that have begun, without those that have ended before `since`. runs:
    directory of each, by its name."""
    found = [RunPaths(Path(folder)) for folder in runs.values()]
    paths = [one for one in found if one.config.exists()]
    queue, _ = ask_slurm(paths)
    judged = [(files, judge(files, queue)) for files in map(RunFiles, paths)]
    return [
        state
        for files, state in judged
        if state.state in _MAY_NEED or _last_time(files, state) >= since
    ]


def _last_time(files: RunFiles, state: RunState) -> float:
    """Time of the newest thing that may have ended the run; now without any. Not of its newest log, which
    the next command writes before it trains anything."""
    times = [one.time for one in files.log if _may_end(one)]
    times += [step.time for step in files.steps[-1:]]
    # Of staging, or of training before its first launch, no event tells.
    if state.state == "failed" and state.log and (error := last_error(state.log)):
        times.append(error.time)
    return max(times, default=files.now)


def _may_end(event: Event) -> bool:
    if isinstance(event, events.Preflight):
        return event.status != "ok"
    return isinstance(event, events.Launch | events.End | events.Validate)


def events_of(states: Sequence[RunState], *, ended: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Key and event of each run that has ended or needs a person. ended: whether Snakemake has ended."""
    for state in states:
        if state.state in FINAL or (ended and state.state != "not started"):
            yield f"{state.run}: {state.state}", _event("run ended", state)
        elif state.state in _MAY_NEED and state.next:
            # Each finding is told, whatever was told before.
            what = state.finding or "needs a person"
            yield f"{state.run}: {what}", _event("run needs a person", state)


def _event(event: str, state: RunState) -> dict[str, Any]:
    return {
        "event": event,
        "run": state.run,
        "state": state.state,
        "message": state.headline,
        "next": state.next,
        "job": state.job,
    }


class Notifier:
    """Starts the program, each call in a process of its own, and never waits for one of them."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._calls: list[tuple[subprocess.Popen[bytes], float, str]] = []  # with its deadline

    def call(self, event: dict[str, Any]) -> None:
        """Start the program with this event as JSON on standard input."""
        if not self._command:
            return
        values = {**event, "project": str(Path.cwd()), "time": time.time()}
        try:
            # No pipe, which a program that does not read would fill.
            with tempfile.TemporaryFile() as file:
                file.write(json.dumps(values).encode() + b"\n")
                file.seek(0)
                process = subprocess.Popen(self._command, stdin=file, start_new_session=True)
        except OSError as err:
            say(f"warning: notify.command {self._command[0]} was not started: {err}")
            return
        self._calls.append((process, time.monotonic() + LIMIT_SEC, str(event["event"])))

    def reap(self) -> bool:
        """Kill calls that take too long, and say which have failed. Whether any still runs."""
        left = []
        for process, deadline, event in self._calls:
            if (status := process.poll()) is None and time.monotonic() > deadline:
                process.kill()
                process.wait()
                say(f"warning: notify.command ({event}) was killed after {LIMIT_SEC:g} s")
            elif status is None:
                left.append((process, deadline, event))
            elif status:
                say(f"warning: notify.command ({event}) ended with status {status}")
        self._calls = left
        return bool(left)

    def finish(self) -> None:
        """Wait for all calls, which their time limit bounds."""
        while self.reap():
            time.sleep(0.1)
