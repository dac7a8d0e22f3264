"""Jobs that are stopped: by the clock, by others who come first, by a person. Each ends with the
weights of the uninterrupted run, or stays ended where a person wished it."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime

import pytest

from tools.slurm_cluster.cluster import Cluster
from tools.slurm_cluster.machines import wait_until

from .job_run import PAUSE, JobRun, Uninterrupted, measure

BOTH = pytest.mark.parametrize("launcher", ["srun", "torchrun"])
NewRun = Callable[..., JobRun]


@BOTH
def test_time_limit_is_met_with_a_checkpoint_and_the_job_resumes(
    new_run: NewRun, uninterrupted: Uninterrupted, launcher: str, cluster: Cluster
) -> None:
    run = new_run(launcher, ranks_per_node=2)
    job = run.submit("--time=10", "--signal=SIGUSR1@180")
    run.wait_for_pause()
    # The limit comes near only now: a busy machine may need longer than any time to reach a step.
    # Between two and three minutes are left, so the signal is due, and nothing is in a hurry.
    hours, minutes, _ = map(int, cluster.job(job)["RunTime"].split(":"))
    limit = hours * 60 + minutes + 3
    shorter = ("scontrol", "update", f"JobId={job}", f"TimeLimit={limit}")
    event = time.time()
    cluster.run(*shorter)
    run.end_pause_when_told_to_stop()
    requeued = run.wait_for_event("requeue")
    assert requeued["cause"] == "SIGUSR1"
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=10")  # one time is enough
    run.wait_for_end(job)
    uninterrupted.equals(run)
    assert measure("time limit", run, event)["steps_lost"] == 0


def test_time_limit_that_nothing_announces_is_asked_of_slurm(
    new_run: NewRun, uninterrupted: Uninterrupted, cluster: Cluster
) -> None:
    run = new_run()
    job = run.submit("--time=1")
    run.wait_for_pause()
    # They wait until what a stop may need does not fit any more; then they stop, unsignaled.
    limit = datetime.fromisoformat(cluster.job(job)["EndTime"]).timestamp()
    wait_until(lambda: time.time() > limit - 8, 60, "the limit is near")
    run.end_pause()
    event = time.time()
    assert run.wait_for_event("requeue")["cause"] == "deadline"
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=10")
    run.wait_for_end(job)
    uninterrupted.equals(run)
    assert measure("time limit, asked of Slurm", run, event)["steps_lost"] == 0


@BOTH
def test_preempted_job_resumes_after_the_other(
    new_run: NewRun, uninterrupted: Uninterrupted, launcher: str, cluster: Cluster
) -> None:
    run = new_run(launcher)
    job = run.submit("--partition=low")
    run.wait_for_pause()
    event = time.time()
    preempt(cluster, run)
    run.end_pause_when_told_to_stop()
    ended = run.wait_for_end(job)
    assert ended["JobState"] == "COMPLETED"
    assert ended["Restarts"] == "1"
    uninterrupted.equals(run)
    assert measure("preemption, requeue", run, event)["steps_lost"] == 0


def test_job_that_a_preemption_would_cancel_requeues_itself(
    new_run: NewRun, uninterrupted: Uninterrupted, cluster: Cluster
) -> None:
    run = new_run()
    job = run.submit("--partition=lowcancel")
    run.wait_for_pause()
    event = time.time()
    preempt(cluster, run)
    run.end_pause_when_told_to_stop()
    run.wait_for_event("requeue")
    assert run.wait_for_end(job)["JobState"] == "COMPLETED"
    uninterrupted.equals(run)
    assert measure("preemption, cancel", run, event)["steps_lost"] == 0


def test_cancelled_job_leaves_a_checkpoint_and_stays_ended(
    new_run: NewRun, uninterrupted: Uninterrupted, cluster: Cluster
) -> None:
    run = new_run()
    job = run.submit()
    run.wait_for_pause()
    event = time.time()
    cluster.run("scancel", job)
    run.end_pause_when_told_to_stop()
    wait_until(
        lambda: job not in [each["id"] for each in cluster.squeue()], 60, f"{job} left the queue"
    )
    assert run.events("requeue") == []
    [stop] = run.events("stop")
    assert stop["step"] >= PAUSE
    again = run.submit()
    run.wait_for_end(again)
    uninterrupted.equals(run)
    assert measure("scancel, then the command again", run, event)["steps_lost"] == 0


def test_signal_by_scancel_sends_the_job_back(
    new_run: NewRun, uninterrupted: Uninterrupted, cluster: Cluster
) -> None:
    run = new_run()
    job = run.submit()
    run.wait_for_pause()
    event = time.time()
    cluster.run("scancel", "--signal=TERM", job)
    run.end_pause_when_told_to_stop()
    assert run.wait_for_event("requeue")["cause"] == "SIGTERM"
    run.wait_for_end(job)
    uninterrupted.equals(run)
    assert measure("scancel --signal=TERM", run, event)["steps_lost"] == 0


def test_stop_file_ends_the_job_for_good(new_run: NewRun) -> None:
    run = new_run()
    job = run.submit()
    run.wait_for_pause()
    event = time.time()
    run.paths.stop.touch()
    run.end_pause()
    ended = run.wait_for_end(job)
    assert ended["ExitCode"] == "75:0"
    assert ended["Restarts"] == "0"
    [stop] = run.events("stop")
    assert stop["cause"] == "STOP file" and stop["step"] >= PAUSE
    assert measure("STOP file", run, event)["outcome"] == "ends"


def preempt(cluster: Cluster, run: JobRun) -> None:
    """A job that comes first needs the run's nodes for a moment."""
    hosts = run.events("launch")[-1]["nodes"]
    cluster.submit(
        *("--partition=high", "--exclusive", "--nodes=2", f"--nodelist={','.join(hosts)}"),
        *("--output=/dev/null", "--wrap=sleep 2"),
    )
