"""`forge status`: the current state of each run, from its files and squeue."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from forge.cluster import jobs, slurm
from forge.cluster.jobs import QueuedJob
from forge.cluster.pending import lasting_advice
from forge.core import events, json_lines
from forge.core.errors import ConfigError, DataError
from forge.core.events import Event
from forge.core.files import read_object_or_empty
from forge.core.paths import RunPaths
from forge.core.process import Process
from forge.core.records import Validated, Validation
from forge.core.tail import last_lines
from forge.core.terminal import Table, duration, is_terminal, say
from forge.reporting.find_runs import results_folder

ASK_SEC = 3.0  # how long squeue may take: a table a little later is better than a wrong one
WATCH_SEC = 5.0
METRICS_BYTES = 2**16  # some 300 lines of metrics.jsonl, for the newest step and the rate

# No new step for this long, and for so many times the usual, is worth a look.
STALL_SEC = 60.0
STALL_TIMES = 10
# Imports, rendezvous, digests of shards and compiling take minutes on a cold file system, no more.
SLOW_START_SEC = 300.0

TRAINING = "training"
TONES = {
    **dict.fromkeys(("running", "waiting"), "cyan"),
    **dict.fromkeys(("done", "validated"), "green"),
    **dict.fromkeys(("failed", "invalid", "cut off"), "red"),
}  # the rest: yellow


@dataclass(frozen=True)
class Row:
    """One run in the table. loss and tokens_per_sec of the last step that was logged."""

    run: str
    state: str  # not started, waiting, running, stopped, cut off, failed, done, validated, invalid
    job: str = (
        ""  # of Slurm: the one that is in the queue, with its nodes, else the last; else the host
    )
    step: int | None = None
    goal: int | None = None
    loss: float | None = None
    tokens_per_sec: float | None = None
    restarts: int = 0
    eta_sec: float | None = None  # None when it does not train, or just began
    now: str = ""  # what it does, where it hangs, what to do


def status(runs: Sequence[RunPaths], *, watch: bool = False, as_json: bool = False) -> None:
    """Print one line a run to standard output, as a table or as JSON.

    watch: draw it again every few seconds until Ctrl-C. Raises ConfigError without a terminal then.
    """
    if watch:
        if not is_terminal(sys.stdout):
            raise ConfigError("--watch needs a terminal", fix="leave it out, or use --json")
        _watch(runs)
        return
    rows, note = look(runs)
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    elif not rows:
        say(f"no runs in {results_folder()}/ yet: train one with make train, or name their folders")
    else:
        _table(rows).print()
    if note:
        say(note)


def look(runs: Sequence[RunPaths]) -> tuple[list[Row], str]:
    """A row for each run, and a note when Slurm's side of it is missing."""
    queue, note = _queue(runs)
    return [row(paths, queue) for paths in runs], note


def _queue(runs: Sequence[RunPaths]) -> tuple[list[QueuedJob] | None, str]:
    """Slurm's queue; None where it cannot be asked."""
    if not slurm.is_here():
        return None, ""
    # A run of a colleague in a shared folder is asked for as well.
    users = {os.getuid(), *(paths.root.stat().st_uid for paths in runs)}
    try:
        return jobs.read_queue(users, patience_sec=0, timeout_sec=ASK_SEC), ""
    except slurm.SlurmSilent as err:
        what = _clipped(err.what.split("\n")[0])
        return None, f"note: {what}; the table comes from the runs' files alone"


# --- what the files say ----------------------------------------------------------------------------


@dataclass
class _Files:
    """What a run's files say."""

    paths: RunPaths
    now: float = field(default_factory=time.time)

    @cached_property
    def log(self) -> list[Event]:
        return events.read(self.paths.events)

    @cached_property
    def launches(self) -> list[events.Launch]:
        return [event for event in self.log if isinstance(event, events.Launch)]

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        """The last training steps that were logged, oldest first."""
        lines = map(json_lines.parse, last_lines(self.paths.metrics, METRICS_BYTES)[0])
        return [line for line in lines if line and line.get("kind") == "train"]

    @cached_property
    def steps_of_launch(self) -> list[dict[str, Any]]:
        """Of the newest launch alone."""
        name = self.launches[-1].launch if self.launches else None
        return [step for step in self.steps if step.get("launch") == name]

    def last(self, *kinds: type[Event], since: float = 0.0) -> Any:
        """The newest event of these kinds; None without one."""
        return events.last([event for event in self.log if event.time >= since], *kinds)

    @cached_property
    def goal(self) -> int | None:
        return read_object_or_empty(self.paths.config).get("train", {}).get("max_steps")

    @cached_property
    def step(self) -> int | None:
        """The newest step that was logged, committed or gone on from."""
        saved = self.last(events.Save, events.Stop, events.Completed)
        known = [(event.time, event.step) for event in (self.last(events.Init), saved) if event]
        known += [(line["time"], line["step"]) for line in self.steps[-1:]]
        return max(known)[1] if known else None

    @cached_property
    def rate(self) -> float | None:
        """Steps per second of this launch, with its evaluations and saves."""
        first, last = (self.steps_of_launch or [{}])[0], (self.steps_of_launch or [{}])[-1]
        seconds = last.get("time", 0) - first.get("time", 0)
        return (last["step"] - first["step"]) / seconds if seconds > 0 else None

    @cached_property
    def lock(self) -> dict[str, Any]:
        """Who writes the run's folder; {} if nobody does."""
        return read_object_or_empty(self.paths.root / ".lock")

    @cached_property
    def lock_since(self) -> float:
        try:
            return (self.paths.root / ".lock").stat().st_mtime
        except FileNotFoundError:
            return self.now

    @property
    def job_ids(self) -> set[str]:
        """Jobs that the files name: of the lock, else of the newest launch."""
        named = self.lock.get("slurm_job") or (self.launches and self.launches[-1].job)
        return {str(named)} if named else set()


# --- the state -------------------------------------------------------------------------------------


def row(paths: RunPaths, queue: Sequence[QueuedJob] | None) -> Row:
    """Where a run stands. queue: Slurm's, None where it cannot be asked."""
    try:
        return _row(_Files(paths), queue)
    except DataError as err:
        return Row(paths.root.name, "unknown", now=f"{err.what}: {err.fix}")


def _row(files: _Files, queue: Sequence[QueuedJob] | None) -> Row:
    paths = files.paths
    job = jobs.of_run(queue or (), paths.root.name, files.job_ids, Path.cwd())
    state, now = _state(files, job, queue)
    last = files.steps[-1] if files.steps else {}
    is_training = now == TRAINING and files.rate and files.goal and files.step is not None
    return Row(
        run=paths.root.name,
        state=state,
        job=_where(files, job, state),
        step=files.step,
        goal=files.goal,
        loss=last.get("loss"),
        tokens_per_sec=last.get("tokens_per_sec"),
        restarts=max(0, len(files.launches) - 1),
        eta_sec=(files.goal - files.step) / files.rate if is_training else None,  # type: ignore[operator]
        now=now,
    )


def _where(files: _Files, job: QueuedJob | None, state: str) -> str:
    if job:
        return f"{job.id} on {job.nodes}" if job.nodes else job.id
    if files.job_ids or state != "running":
        return "".join(files.job_ids)
    return str(files.lock.get("host", ""))


def _state(
    files: _Files, job: QueuedJob | None, queue: Sequence[QueuedJob] | None
) -> tuple[str, str]:
    """(state, what it does now)."""
    if job and job.is_waiting:
        return "waiting", _waits(files, job)
    holder = _holder(files, job, queue)
    if holder == "lives":
        return "running", _phase(files)
    if job:
        return "running", _between(files, job)
    if holder == "unknown":
        who = f"its process on {files.lock['host']} cannot be asked from here"
        return "unknown", f"{who}; last sign of life {_ago(files.now - _sign_of_life(files))}"
    if holder == "gone":
        return "cut off", "its process is gone: rerun the command"
    return _ended(files)


def _holder(files: _Files, job: QueuedJob | None, queue: Sequence[QueuedJob] | None) -> str:
    """How the process that holds the lock is: lives, gone, unknown; none where nobody holds it."""
    try:
        process = Process.from_json(files.lock)
    except (KeyError, TypeError):
        return "none"
    if process.is_here:
        return "lives" if process.is_alive() else "gone"
    if process.slurm_job and queue is not None:
        return "lives" if job and job.id == process.slurm_job else "gone"
    return "unknown"


def _sign_of_life(files: _Files) -> float:
    times = [event.time for event in files.log[-1:]] + [line["time"] for line in files.steps[-1:]]
    return max(times, default=files.lock_since)


def _waits(files: _Files, job: QueuedJob) -> str:
    text = f"{job.state} ({job.reason})"
    if job.submitted:
        text += f" for {duration(files.now - job.submitted)}"
    if job.start and job.start > files.now:
        text += f", expected to start in {duration(job.start - files.now)}"
    if advice := lasting_advice(job.id, job.reason):
        text += f"; it does not pass by itself: {advice}"
    return text


def _between(files: _Files, job: QueuedJob) -> str:
    """The job runs and no verb holds the run: before the first of them, or between two."""
    since = job.start or files.now
    if not files.paths.stage.exists():
        what = "starting, or staging"
    elif not files.paths.preflight_pass.exists():
        what, since = "staged", files.paths.stage.stat().st_mtime
    else:
        what, since = "preflight passed", files.paths.preflight_pass.stat().st_mtime
    return f"{what} for {duration(files.now - since)}" + _look_at_logs(files, since)


def _look_at_logs(files: _Files, since: float) -> str:
    """Where to look when nothing happens for longer than it should."""
    return f": forge logs {files.paths.root}" if files.now - since > SLOW_START_SEC else ""


def _phase(files: _Files) -> str:
    """What the verb that holds the lock is doing, and for how long."""
    verb, since = files.lock.get("verb"), files.lock_since
    if verb != "train":
        return f"{verb} for {duration(files.now - since)}" + _look_at_logs(files, since)
    # A second of grace: the lock's time is the file system's clock.
    event = files.last(events.Launch, events.Init, events.Lost, events.Completed, since=since - 1)
    began = event.time if event else since
    match event:
        case events.Completed():
            return f"at its goal, finishing for {duration(files.now - began)}"
        case events.Init():
            return _training(files, began)
        case events.Launch():
            what = "starting ranks"
        case events.Lost():
            what = "a rank was lost, starting again"
        case _:
            what = "starting"
    return f"{what} for {duration(files.now - began)}" + _look_at_logs(files, began)


def _training(files: _Files, began: float) -> str:
    """Training, or that no step has come for longer than steps, evaluation and saves usually take."""
    steps = files.steps_of_launch
    other = files.last(events.Eval, events.Save, since=began)
    last = max(began, other.time if other else 0, steps[-1]["time"] if steps else 0)
    gaps = [after["time"] - before["time"] for before, after in pairwise(steps)]
    patience = max(STALL_SEC, STALL_TIMES * median(gaps)) if gaps else SLOW_START_SEC
    silent = files.now - last
    if silent > patience:
        return f"no step for {duration(silent)}: forge logs {files.paths.root}"
    return TRAINING if steps else f"first steps for {duration(files.now - began)}"


# What a run can have been ended by; a preflight that passed ends nothing.
_ENDS = (events.Launch, events.Stop, events.Requeue, events.Lost, events.Failed, events.Completed)


def _ended(files: _Files) -> tuple[str, str]:
    """The state of a run that nothing works on, by the last thing that happened to it."""
    last = files.last(*_ENDS, events.Preflight)
    if isinstance(last, events.Preflight) and last.status == "ok":
        last = files.last(*_ENDS)
    again = "rerun the command to resume"
    match last:
        case None:
            return "not started", "nothing has trained yet"
        case events.Completed():
            return _completed(files)
        case events.Failed(message=message):
            said = message.split("\n")[0]
            return "failed", f"{_clipped(said)}: forge logs {files.paths.root}"
        case events.Preflight(failed=failed):
            return (
                "failed",
                f"preflight: {', '.join(failed) or 'see'} {files.paths.preflight_table}",
            )
        case events.Stop(cause=cause) | events.Requeue(cause=cause):
            stop = files.paths.stop
            first = f"rm {stop}, then " if stop.exists() else ""
            return "stopped", f"{cause}: {first}{again}"
    return "cut off", f"no end was recorded: {again}"


def _completed(files: _Files) -> tuple[str, str]:
    step = files.step
    if files.goal is not None and step is not None and step < files.goal:
        return (
            "stopped",
            f"step {step} was its goal, now it is {files.goal}: rerun the command",
        )
    validation = Validation.read_if_there(files.paths.validation)
    if validation and validation.step == step and validation.status == "invalid":
        return "invalid", _clipped(validation.reasons[0])
    validated = Validated.read_if_there(files.paths.validated)
    if validated and validated.step == step:
        loss = validated.loss
        return "validated", "" if loss is None else f"held-out loss {loss:.3f}"
    return "done", f"not validated yet: forge validate {files.paths.config}"


# --- for people ------------------------------------------------------------------------------------

_HEADS = ("run", "state", "job", "step", "loss", "tokens/s", "restarts", "ETA", "now")
_NUMBERS = ("step", "loss", "tokens/s", "restarts", "ETA")


def _cells(one: Row) -> list[str]:
    step = "" if one.step is None else str(one.step)
    return [
        one.run,
        one.state,
        one.job,
        f"{step or 0}/{one.goal}" if one.goal else step,
        "" if one.loss is None else f"{one.loss:.3f}",
        "" if one.tokens_per_sec is None else f"{one.tokens_per_sec:,.0f}",
        str(one.restarts),
        "" if one.eta_sec is None else duration(one.eta_sec),
        one.now,
    ]


def _table(rows: Sequence[Row]) -> Table:
    table = Table(_HEADS, numbers=_NUMBERS, wrapped=("job", "now"))
    for one in rows:
        table.add(_cells(one), {"run": "bold", "state": TONES.get(one.state, "yellow")})
    return table


def _watch(runs: Sequence[RunPaths]) -> None:
    from rich.console import Group
    from rich.live import Live

    try:
        with Live(auto_refresh=False) as live:
            while True:
                rows, note = look(runs)
                foot = f"{time.strftime('%H:%M:%S')}  Ctrl-C ends this, not the runs  {note}"
                live.update(Group(_table(rows).drawn(), "", foot.rstrip()), refresh=True)
                time.sleep(WATCH_SEC)
    except KeyboardInterrupt:
        pass


def _ago(seconds: float) -> str:
    return f"{duration(seconds)} ago"


def _clipped(text: str, width: int = 90) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
