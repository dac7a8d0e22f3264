"""Faults for a job with rank processes on the test cluster: each is done, and seen to have happened."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Protocol

import psutil

from tools.slurm_cluster.cluster import Cluster
from tools.slurm_cluster.machines import ClusterError, wait_until

AWAY_SEC = 30.0  # for which slurmctld is away


class StruckJob(Protocol):
    """A training that runs as a Slurm job."""

    @property
    def cluster(self) -> Cluster: ...

    @property
    def job(self) -> str:
        """Slurm's id of the job that trains now."""

    @property
    def nodes(self) -> list[str]:
        """Those on which its ranks run."""

    def said(self) -> str:
        """The last lines of its logs, for an error."""

    def node_is_back(self, name: str) -> None:
        """Called after a node that a fault took has booted again."""


# A fault gets the job and its rank processes. It returns once the fault is seen to have happened, with
# what repairs it later. Raises ClusterError where it is not seen.
Repair = Callable[[], None]
Fault = Callable[[StruckJob, list[psutil.Process]], Repair]


def nothing() -> None:
    """Nothing has to be repaired."""


def kill_rank(job: StruckJob, ranks: list[psutil.Process]) -> Repair:
    ranks[-1].kill()
    wait_until(lambda: is_gone(ranks[-1]), 10, f"dead: rank process {ranks[-1].pid}")
    return nothing


def hang_rank(job: StruckJob, ranks: list[psutil.Process]) -> Repair:
    ranks[-1].suspend()
    stopped = psutil.STATUS_STOPPED
    wait_until(lambda: ranks[-1].status() == stopped, 10, f"stopped: rank process {ranks[-1].pid}")
    return nothing


def requeue(job: StruckJob, ranks: list[psutil.Process]) -> Repair:
    before = restarts(job)
    job.cluster.run("scontrol", "requeue", job.job)
    wait_until(
        lambda: restarts(job) > before or _state(job) != "RUNNING", 30, "requeued", every=0.2
    )
    return nothing


def preempt(job: StruckJob, ranks: list[psutil.Process]) -> Repair:
    """A job that comes first needs the nodes for two seconds."""
    hosts = job.nodes
    first = job.cluster.submit(
        *("--partition=high", "--exclusive", f"--nodes={len(hosts)}"),
        *(f"--nodelist={','.join(hosts)}", "--output=/dev/null", "--wrap=sleep 2"),
    )
    try:
        job.cluster.wait_for_state(first, "RUNNING COMPLETED", timeout=90)
    except ClusterError:  # another event has taken one of these nodes: it must not strike later
        job.cluster.run("scancel", first)
        raise
    return nothing


def reach_time_limit(job: StruckJob, ranks: list[psutil.Process]) -> Repair:
    """The time limit comes one to two minutes near, so that a signal which was asked for two minutes
    before it is due. Returns when the job has been requeued, or has ended."""
    struck, before = job.job, restarts(job)
    of_job = job.cluster.job(struck)
    near, limit = _minutes(of_job["RunTime"]) + 2, _minutes(of_job["TimeLimit"])
    if is_first := limit > near:  # else another event has brought it near, and will restore it
        _set_time_limit(job.cluster, struck, near)

    def has_ended() -> bool:
        with contextlib.suppress(ClusterError):  # another fault: slurmctld is away
            facts = job.cluster.job(struck)
            return int(facts["Restarts"]) > before or facts["JobState"] != "RUNNING"
        return False

    # Slurm looks at time limits every 30 s, and waits for KillWait before it kills.
    wait_until(has_ended, 240, f"at its time limit: job {struck}", job.said, every=0.2)

    def repair() -> None:
        with contextlib.suppress(ClusterError):  # it has ended for good
            _set_time_limit(job.cluster, struck, limit)

    return repair if is_first else nothing


def cut_power(job: StruckJob, ranks: list[psutil.Process]) -> Repair:
    name = job.nodes[-1]
    job.cluster.power_cut(name)  # returns when it has no process any more

    def repair() -> None:
        job.cluster.boot(name)
        job.node_is_back(name)

    return repair


def cut_cable(job: StruckJob, ranks: list[psutil.Process]) -> Repair:
    name = job.nodes[-1]
    job.cluster.cable_cut(name)

    def repair() -> None:
        job.cluster.power_cut(name)  # a reboot is quicker than the cable
        job.cluster.boot(name)
        job.node_is_back(name)

    return repair


def stop_slurmctld(job: StruckJob, ranks: list[psutil.Process]) -> Repair:
    job.cluster.stop_daemon("slurmctld")  # returns when it is gone
    end = time.monotonic() + AWAY_SEC

    def repair() -> None:
        time.sleep(max(0.0, end - time.monotonic()))
        job.cluster.start_daemon("slurmctld")

    return repair


def _minutes(text: str) -> int:
    """Whole minutes of Slurm's [days-]hours:minutes:seconds."""
    days, _, clock = text.rpartition("-")
    hours, minutes, _ = map(int, clock.split(":"))
    return 1440 * int(days or 0) + 60 * hours + minutes


def _set_time_limit(cluster: Cluster, job: str, minutes: int) -> None:
    cluster.run("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")


def _state(job: StruckJob) -> str:
    return job.cluster.job(job.job)["JobState"]


def restarts(job: StruckJob) -> int:
    """How often Slurm has requeued the job."""
    return int(job.cluster.job(job.job)["Restarts"])


def is_gone(process: psutil.Process) -> bool:
    """Whether the process has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True
