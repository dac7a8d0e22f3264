"""The job of `forge submit` in this project: what its records and Slurm's queue say of it."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from forge.cluster import jobs, slurm
from forge.core.errors import DataError, UnfitError
from forge.core.paths import CONTROLLER, CONTROLLER_LOG, CONTROLLER_STATE
from forge.core.records import Controller, ControllerState
from forge.core.terminal import duration

# Set for the dry run of `forge submit`.
CHECKS = "FORGE_CHECKS_FOR_SUBMIT"
JOB_NAME = "forge-submit"
ASK_SEC, STATUS_SEC = 10.0, 3.0  # how long one squeue may take; that of forge status
_FORMAT = "%T|%N|%S|%e|%r|%j|%Z"  # man squeue
_WITHOUT_VALUE = ("N/A", "Unknown")


@dataclass(frozen=True)
class Listed:
    """A job as squeue lists it. Times as Slurm writes them, "" where it has none."""

    state: str
    nodes: str
    start: str
    end: str
    reason: str

    @property
    def words(self) -> str:
        """`RUNNING on node01 since …, limit …`, or `pending (Priority)`."""
        if self.state in slurm.WAITING:
            return f"pending ({self.reason})"
        where = f" on {self.nodes}" if self.nodes else ""
        since = f" since {self.start}" if self.start else ""
        return f"{self.state}{where}{since}" + (f", limit {self.end}" if self.end else "")


def read() -> tuple[Controller, ControllerState | None] | None:
    """The last job that `forge submit` submitted in this project, and what that job has recorded itself;
    None without one. Raises DataError for a file that cannot be read."""
    record = Controller.read_if_there(CONTROLLER)
    if record is None:
        return None
    state = ControllerState.read_if_there(CONTROLLER_STATE)
    return record, state if state and state.job == record.job else None


def listed(
    job_id: str, *, patience_sec: float | None = None, timeout_sec: float = ASK_SEC
) -> Listed | None:
    """The job in Slurm's queue; None for one that has ended. patience_sec, timeout_sec: as for slurm.ask.
    Raises SlurmSilent."""
    line = ("squeue", "--noheader", f"--jobs={job_id}", f"--format={_FORMAT}")
    try:
        text = slurm.ask(*line, patience_sec=patience_sec, timeout_sec=timeout_sec)
    except slurm.Refused as err:
        if "Invalid job id" in str(err):
            return None
        raise slurm.silent(str(err)) from None
    if text.count("|") < 6:
        return None
    *values, name, folder = text.strip().split("|", 6)
    # Ids repeat: between clusters, and after a cluster was set up anew.
    is_ours = name == JOB_NAME and os.path.realpath(folder) == os.path.realpath(Path.cwd())
    job = Listed(*("" if value in _WITHOUT_VALUE else value for value in values))
    return job if is_ours and job.state not in slurm.ENDED else None


def command_of(record: Controller) -> str:
    """The command that submitted it, for people."""
    return f"forge submit {shlex.join(record.command)}"


def refuse_living(runs: Iterable[str] = ()) -> None:
    """UnfitError where a controller of this project waits or runs. runs: only one that has one of these;
    () for any. Nothing is refused where Slurm is not installed."""
    found = read()
    if found is None or not slurm.is_here():
        return
    record, state = found
    if state and state.phase != "running":
        return  # nothing to ask Slurm for, which may not answer
    shared = set(runs) & set(record.check.runs) if runs else set(record.check.runs)
    if not shared or (job := listed(record.job)) is None:
        return
    raise UnfitError(
        f"the controller, job {record.job} ({job.words}), looks after"
        f" {', '.join(sorted(shared))}: {command_of(record)}",
        cause="the runs were submitted before",
        fix="see forge status; wait for it, or stop it and its jobs with: forge submit --stop",
    )


def status_lines() -> list[str]:
    """Lines for people on the controller; [] where none was submitted in this project."""
    try:
        found = read()
    except DataError as err:
        return [f"controller: {err.what}"]
    if found is None:
        return []
    record, state = found
    about = f"controller: job {record.job}"
    try:
        asks = slurm.is_here() and not (state and state.phase != "running")
        job = listed(record.job, patience_sec=0, timeout_sec=STATUS_SEC) if asks else None
    except slurm.SlurmSilent:
        return [f"{about}: Slurm does not answer; {command_of(record)}"]
    if job:
        return [f"{about} {job.words}, {command_of(record)}", *_advice(record, job)]
    return [f"{about} ended: {how_it_ended(record, state)}"]


def _advice(record: Controller, job: Listed) -> list[str]:
    if job.state not in slurm.WAITING:
        return []
    advice = jobs.lasting_advice(record.job, job.reason) or jobs.slow_advice(job.reason)
    return [f"  {advice}"] if advice else []


def how_it_ended(record: Controller, state: ControllerState | None) -> str:
    """What ended the controller, from its own record, else from Slurm's accounting."""
    if state and state.phase != "running":
        ago = duration(max(0.0, time.time() - state.time))
        reason = f" ({state.reason})" if state.reason else ""
        return f"{state.phase}{reason}, {ago} ago"
    how = slurm.accounted_end(record.job, timeout_sec=5.0) if slurm.is_here() else ""
    return (
        f"{how or 'Slurm no longer lists it'}, without a record; see {CONTROLLER_LOG}. Rerun"
        f" {command_of(record)}: it takes its jobs back"
    )
