"""The jobs of `forge submit` in this project: what their records and Slurm's queue say of them."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from forge.core.errors import DataError, UnfitError
from forge.core.terminal import duration, without_passwords
from forge.plugins.controller.places import ControllerPaths
from forge.plugins.controller.records import Controller, ControllerPhase, ControllerState
from forge.slurm import adopt, jobs, slurm

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


@dataclass(frozen=True)
class ControllerJob:
    """A job that `forge submit` has submitted in this project, and what that job has recorded itself."""

    record: Controller
    state: ControllerState | None

    @property
    def has_ended(self) -> bool:
        """Return whether the job's own record says that it has ended. A job without a record may have
        ended, too."""
        return self.state is not None and self.state.phase != "running"

    @property
    def jobs_name(self) -> str:
        """The name in Slurm of the jobs that its Snakemake submits."""
        return adopt.job_name(self.record.check.runs, self.record.check.submitted)

    @property
    def command(self) -> str:
        """The command that submitted it, for people, without passwords in addresses."""
        return f"forge submit {without_passwords(shlex.join(self.record.command))}"

    @property
    def of_runs(self) -> str:
        """`job 12 (base, large)`."""
        return f"job {self.record.job} ({', '.join(sorted(self.record.check.runs))})"

    def listed(self) -> Listed | None:
        """Look the job up as `listed` does; None, without asking Slurm, where the record says that it has
        ended."""
        return None if self.has_ended else listed(self.record.job)

    def elsewhere(self, **limits: float) -> str:
        """Tell why Slurm here knows nothing of the job: it is of another cluster. "" where it is of this
        one, or its record says that it has ended. limits: as for `listed`. Raises SlurmSilent."""
        there = self.record.cluster
        if self.has_ended or there == (here := slurm.cluster_name(**limits)):
            return ""
        return f"it is of cluster {there}, and this is {here}"

    def has_jobs(self) -> bool:
        """Return whether a job of its Snakemake waits or runs. Raises SlurmSilent."""
        return bool(adopt.adoptable(self.jobs_name))


def read() -> list[ControllerJob]:
    """The jobs of `forge submit` in this project, oldest first: those that live, and those that have
    ended since the last one was submitted. Raises DataError for a file that cannot be read."""
    return [_read(paths) for paths in ControllerPaths.all()]


def _read(paths: ControllerPaths) -> ControllerJob:
    record = Controller.read(paths.record)
    return ControllerJob(record, ControllerState.read_if_there(paths.state))


def forget_ended(new: Controller) -> None:
    """Remove the records of jobs that have ended and left none in the queue, or none but what `new` takes
    back. Keeps those that Slurm cannot be asked about, such as those of another cluster."""
    for paths in ControllerPaths.all():
        with suppress(DataError, slurm.SlurmSilent):
            old = _read(paths)
            if old.record.job == new.job or old.listed() or old.elsewhere():
                continue
            if old.record.check.runs.keys() & new.check.runs.keys() or not old.has_jobs():
                paths.remove()


def listed(
    job_id: str, *, patience_sec: float | None = None, timeout_sec: float = ASK_SEC
) -> Listed | None:
    """A job of `forge submit` in Slurm's queue; None for one that has ended. patience_sec, timeout_sec:
    as for slurm.ask. Raises SlurmSilent."""
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


def refuse_living(runs: Iterable[str], shared: Iterable[str] = ()) -> None:
    """UnfitError where a controller of this project waits or runs that looks after one of these runs, or
    will make one of these files, or may do so on another cluster. Nothing is refused where Slurm is not
    installed."""
    if not slurm.is_here():
        return
    for controller in read():
        check = controller.record.check
        same = sorted(check.runs.keys() & set(runs))
        files = sorted(set(check.shared) & set(shared))
        if not (same or files):
            continue
        job_id = controller.record.job
        if (job := controller.listed()) is None:
            if why := controller.elsewhere():
                raise _unknown(controller, why, same, files)
            continue
        if same:
            raise UnfitError(
                f"the controller, job {job_id} ({job.words}), looks after {', '.join(same)}:"
                f" {controller.command}",
                cause="the runs were submitted before",
                fix="see forge status; wait for it, or stop it and its jobs with: forge submit --stop"
                f" {job_id}\n         (other runs beside it: in a sheet without these,"
                " --config runs=config/others.tsv)",
            )
        raise UnfitError(
            f"the controller, job {job_id} ({job.words}), makes {', '.join(files)}, which these runs"
            " need, too",
            cause="both commands would make the same files",
            fix="wait until they are there (forge status), then rerun the same command",
        )


def _unknown(
    controller: ControllerJob, why: str, runs: Sequence[str], files: Sequence[str]
) -> UnfitError:
    job_id = controller.record.job
    does = f"look after {', '.join(runs)}" if runs else f"make {', '.join(files)}"
    return UnfitError(
        f"the controller, job {job_id}, may still {does}: {why}; {controller.command}",
        cause="several clusters share this directory, and each knows its own jobs only",
        fix=f"on the other cluster see forge status, or stop it with: forge submit --stop {job_id}"
        f"\n         (where that is gone for good: rm {ControllerPaths(job_id).record})",
    )


# --- what people and scripts read -------------------------------------------------------------------


@dataclass(frozen=True)
class ControllerStatus:
    """A controller as `forge status` shows it."""

    job: str
    state: Literal["waiting", "unknown", "cut off", "unreadable"] | ControllerPhase
    """`unknown`: Slurm does not answer, or is that of another cluster. `cut off`: ended without a record.
    `unreadable`: its record."""
    log: str
    reason: str = ""
    """Why it waits (Slurm's word), what ended it, or why it is unknown where Slurm answers."""
    slurm_state: str = ""
    """Slurm's word while it runs, such as COMPLETING."""
    nodes: str = ""
    since: str = ""
    limit: str = ""
    """When it started, and when its time limit ends, as Slurm writes them; "" unless it runs."""
    ended: float | None = None
    """In seconds since the epoch."""
    runs: tuple[str, ...] = ()
    command: str = ""
    next: str = ""
    """What a person has to do; "" where that is nothing."""

    def to_json(self) -> dict[str, Any]:
        """For scripts."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For people."""
        about = f"controller: job {self.job}"
        if self.state == "waiting":
            advice = [f"  {self.next}"] if self.next else []
            return [f"{about} pending ({self.reason}), {self.command}", *advice]
        if self.state == "running":
            job = Listed(self.slurm_state, self.nodes, self.since, self.limit, "")
            return [f"{about} {job.words}, {self.command}"]
        if self.state == "unknown":
            return [f"{about}: {self.reason or 'Slurm does not answer'}; {self.command}"]
        if self.state == "unreadable":
            return [f"{about}: {self.reason}"]
        return [f"{about} ended: {self._end()}"]

    def _end(self) -> str:
        if self.state == "cut off":
            return f"{self.reason}, without a record; see {self.log}. {self.next}"
        reason = f" ({self.reason})" if self.reason else ""
        return f"{self.state}{reason}, {duration(max(0.0, time.time() - (self.ended or 0)))} ago"


def statuses() -> list[ControllerStatus]:
    """States of all controllers that `read` finds, also where Slurm does not answer."""
    found = []
    for paths in ControllerPaths.all():
        try:
            found.append(status_of(_read(paths)))
        except DataError as err:
            state = ControllerStatus(paths.job, "unreadable", str(paths.log), reason=err.what)
            found.append(state)
    return found


def status_of(controller: ControllerJob) -> ControllerStatus:
    """State of a controller, by its own record, then Slurm's queue, else accounting."""
    job_id = controller.record.job
    shown = ControllerStatus(
        job_id,
        "unknown",
        str(ControllerPaths(job_id).log),
        runs=tuple(sorted(controller.record.check.runs)),
        command=controller.command,
    )
    if (state := controller.state) and controller.has_ended:
        return replace(shown, state=state.phase, reason=state.reason, ended=state.time)
    asks, limits = slurm.is_here(), {"patience_sec": 0.0, "timeout_sec": STATUS_SEC}
    try:
        job = listed(job_id, **limits) if asks else None
        if asks and job is None and (why := controller.elsewhere(**limits)):
            return replace(shown, reason=why)
    except slurm.SlurmSilent:
        return shown
    if job is None:
        how = slurm.accounted_end(job_id, timeout_sec=5.0) if asks else ""
        advice = f"Rerun {controller.command}: it takes its jobs back"
        reason = how or "Slurm no longer lists it"
        return replace(shown, state="cut off", reason=reason, next=advice)
    if job.state in slurm.WAITING:
        advice = jobs.lasting_advice(job_id, job.reason) or jobs.slow_advice(job.reason)
        return replace(shown, state="waiting", reason=job.reason, next=advice)
    return replace(
        shown,
        state="running",
        slurm_state=job.state,
        nodes=job.nodes,
        since=job.start,
        limit=job.end,
    )
