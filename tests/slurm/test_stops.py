"""Jobs that are stopped: by the clock, by others who come first, by a person. Each ends with the
weights of the undisturbed run, or stays ended where a person wished it."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime

import pytest

from tools.slurm_cluster.cluster import Cluster
from tools.slurm_cluster.machines import wait_until

from .job_run import JobRun, Undisturbed, measure, signaled

BOTH = pytest.mark.parametrize("launcher", ["srun", "torchrun"])
NewRun = Callable[..., JobRun]
# Ranks that a test holds until Slurm has acted are waited for by nobody meanwhile.
PATIENT = {"backend": "gloo", "timeout_sec": 120}


@BOTH
def test_time_limit_is_met_with_a_checkpoint_and_the_job_goes_on(
    new_run: NewRun, undisturbed: Undisturbed, launcher: str, cluster: Cluster
) -> None:
    run = new_run(launcher, fabric=PATIENT)
    job = run.submit("--time=10", "--signal=SIGUSR1@180")
    run.wait_for_step(50)
    # The limit comes near only now: a busy machine may need longer than any time to reach a step.
    # Between two and three minutes are left, so the signal is due, and nothing is in a hurry.
    hours, minutes, _ = map(int, cluster.job(job)["RunTime"].split(":"))
    limit = hours * 60 + minutes + 3
    shorter = ("scontrol", "update", f"JobId={job}", f"TimeLimit={limit}")
    run.hold(signaled, timeout=90, cause=lambda: cluster.run(*shorter))
    event, step = time.time(), run.step()
    requeued = run.wait_for_event("requeue")
    assert requeued["cause"] == "SIGUSR1"
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=10")  # one time is enough
    run.wait_for_end(job)
    undisturbed.equals(run)
    assert measure("time limit", run, event, step)["steps_lost"] == 0


def test_time_limit_that_nothing_announces_is_asked_of_slurm(
    new_run: NewRun, undisturbed: Undisturbed, cluster: Cluster
) -> None:
    # One rank on each node: fifty steps of four may take a busy machine more than the minute.
    run = new_run(ranks_per_node=1, fabric=PATIENT)
    job = run.submit("--time=1")
    run.wait_for_step(50)
    # Held until what a stop may need does not fit any more; then they stop, and nobody signals them.
    limit = datetime.fromisoformat(cluster.job(job)["EndTime"]).timestamp()
    run.hold(lambda _: time.time() > limit - 8, timeout=60)
    event, step = time.time(), run.step()
    assert run.wait_for_event("requeue")["cause"] == "deadline"
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=10")
    run.wait_for_end(job)
    undisturbed.equals(run)
    assert measure("time limit, asked of Slurm", run, event, step)["steps_lost"] == 0


@BOTH
def test_preempted_job_goes_on_after_the_other(
    new_run: NewRun, undisturbed: Undisturbed, launcher: str, cluster: Cluster
) -> None:
    run = new_run(launcher, fabric=PATIENT)
    job = run.submit("--partition=low")
    run.wait_for_step(50)
    event, step = time.time(), run.step()
    run.hold(signaled, timeout=60, cause=lambda: preempt(cluster, run))
    ended = run.wait_for_end(job)
    assert ended["JobState"] == "COMPLETED"
    assert ended["Restarts"] == "1"
    undisturbed.equals(run)
    assert measure("preemption, requeue", run, event, step)["steps_lost"] == 0


def test_job_that_a_preemption_would_cancel_goes_back_by_itself(
    new_run: NewRun, undisturbed: Undisturbed, cluster: Cluster
) -> None:
    run = new_run(fabric=PATIENT)
    job = run.submit("--partition=lowcancel")
    run.wait_for_step(50)
    event, step = time.time(), run.step()
    run.hold(signaled, timeout=60, cause=lambda: preempt(cluster, run))
    run.wait_for_event("requeue")
    assert run.wait_for_end(job)["JobState"] == "COMPLETED"
    undisturbed.equals(run)
    assert measure("preemption, cancel", run, event, step)["steps_lost"] == 0


def test_cancelled_job_leaves_a_checkpoint_and_stays_ended(
    new_run: NewRun, undisturbed: Undisturbed, cluster: Cluster
) -> None:
    # One rank on each node: a step and a save of four may take a busy machine more than KillWait.
    run = new_run(ranks_per_node=1)
    job = run.submit()
    run.wait_for_step(50)
    event, step = time.time(), run.step()
    cluster.run("scancel", job)
    wait_until(
        lambda: job not in [each["id"] for each in cluster.squeue()], 60, f"{job} left the queue"
    )
    assert run.events("requeue") == []
    [stop] = run.events("stop")
    assert stop["step"] >= step
    again = run.submit()
    run.wait_for_end(again)
    undisturbed.equals(run)
    assert measure("scancel, then the command again", run, event, step)["steps_lost"] == 0


def test_signal_by_scancel_sends_the_job_back(
    new_run: NewRun, undisturbed: Undisturbed, cluster: Cluster
) -> None:
    run = new_run()
    job = run.submit()
    run.wait_for_step(50)
    event, step = time.time(), run.step()
    cluster.run("scancel", "--signal=TERM", job)
    assert run.wait_for_event("requeue")["cause"] == "SIGTERM"
    run.wait_for_end(job)
    undisturbed.equals(run)
    assert measure("scancel --signal=TERM", run, event, step)["steps_lost"] == 0


def test_stop_file_ends_the_job_for_good(new_run: NewRun) -> None:
    run = new_run()
    job = run.submit()
    run.wait_for_step(50)
    event, step = time.time(), run.step()
    run.paths.stop.touch()
    ended = run.wait_for_end(job)
    assert ended["ExitCode"] == "75:0"
    assert ended["Restarts"] == "0"
    [stop] = run.events("stop")
    assert stop["cause"] == "STOP file" and stop["step"] >= step
    assert measure("STOP file", run, event, step)["outcome"] == "ends"


def preempt(cluster: Cluster, run: JobRun) -> None:
    """A job that comes first needs the run's nodes for a moment."""
    hosts = run.events("launch")[-1]["nodes"]
    cluster.submit(
        *("--partition=high", "--exclusive", "--nodes=2", f"--nodelist={','.join(hosts)}"),
        *("--output=/dev/null", "--wrap=sleep 2"),
    )
