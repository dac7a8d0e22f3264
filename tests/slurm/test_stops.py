"""Jobs that are stopped: by the clock, by others who come first, by a person. Each ends with the
weights of the uninterrupted run, or stays ended where a person wished it."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime

import pytest

from tools.slurm_cluster.cluster import Cluster
from tools.slurm_cluster.machines import wait_until

from .job_run import PAUSE, PAUSES, JobRun, Uninterrupted, preempt

NewRun = Callable[..., JobRun]
WARNED = "--signal=SIGUSR1@180"  # seconds before the time limit


def test_job_resumes_after_its_time_limit_a_signal_a_preemption_and_one_that_would_cancel_it(
    new_run: NewRun, uninterrupted: Uninterrupted, cluster: Cluster
) -> None:
    before_the_limit, before_a_signal, before_a_preemption, before_a_cancellation = 15, 30, 50, 70
    pauses = (before_the_limit, before_a_signal, before_a_preemption, before_a_cancellation)
    run = new_run(pauses=pauses)
    job = run.submit("--partition=low", WARNED)
    times = [reach_time_limit(cluster, run, job, before_the_limit)]
    run.wait_for_pause(before_a_signal)
    times.append(time.time())
    cluster.run("scancel", "--signal=TERM", job)
    run.end_pause_when_told_to_stop(before_a_signal)
    assert run.wait_for_event("requeue", 2)["cause"] == "SIGTERM"
    times.append(preempt(cluster, run, before_a_preemption))
    cluster.wait_for_state(job, "PENDING", timeout=90)
    requeues = len(run.events("requeue"))  # Slurm or Forge, whoever was first
    cluster.run("scontrol", "update", f"JobId={job}", "Partition=lowcancel")
    times.append(preempt(cluster, run, before_a_cancellation))
    run.wait_for_event("requeue", requeues + 1)
    ended = run.wait_for_end(job)
    # Its state is COMPLETED, with Slurm 24.11 PREEMPTED.
    assert (ended["ExitCode"], ended["Restarts"]) == ("0:0", "4")
    uninterrupted.equals(run)
    assert [run.steps_lost(event) for event in times] == [0, 0, 0, 0]


@pytest.mark.weekly
def test_torchrun_job_resumes_after_a_preemption_and_a_time_limit_that_nothing_announces(
    new_run: NewRun, uninterrupted: Uninterrupted, cluster: Cluster
) -> None:
    before_a_preemption, before_the_limit, _ = PAUSES
    run = new_run("torchrun", pauses=(before_a_preemption, before_the_limit))
    job = run.submit("--partition=low")
    preempted = preempt(cluster, run, before_a_preemption)
    cluster.wait_for_state(job, "PENDING", timeout=90)
    requeues = len(run.events("requeue"))  # Slurm or Forge, whoever was first
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=1")
    run.wait_for_pause(before_the_limit)
    resumed = cluster.job(job)
    assert resumed["Restarts"] == "1"
    # They wait until what a stop may need does not fit any more; then they stop, unsignaled.
    limit = datetime.fromisoformat(resumed["EndTime"]).timestamp()
    wait_until(lambda: time.time() > limit - 8, 60, "the limit is near", every=0.2)
    run.end_pause(before_the_limit)
    at_the_limit = time.time()
    assert run.wait_for_event("requeue", requeues + 1)["cause"] == "deadline"
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=10")
    assert run.wait_for_end(job)["JobState"] == "COMPLETED"
    uninterrupted.equals(run)
    assert [run.steps_lost(event) for event in (preempted, at_the_limit)] == [0, 0]


@pytest.mark.weekly
def test_torchrun_job_resumes_after_its_time_limit_then_cancelled_leaves_a_checkpoint_and_stays_ended(
    new_run: NewRun, uninterrupted: Uninterrupted, cluster: Cluster
) -> None:
    before_the_limit, before_a_cancellation, _ = PAUSES
    run = new_run("torchrun", pauses=(before_the_limit, before_a_cancellation))
    job = run.submit(WARNED)
    at_the_limit = reach_time_limit(cluster, run, job, before_the_limit)
    run.wait_for_pause(before_a_cancellation)
    cancelled = time.time()
    cluster.run("scancel", job)
    run.end_pause_when_told_to_stop(before_a_cancellation)
    wait_until(
        lambda: job not in [each["id"] for each in cluster.squeue()],
        120,
        f"{job} left the queue",
        every=0.5,
    )
    assert len(run.events("requeue")) == 1  # at the time limit
    assert run.events("stop")[-1]["step"] >= before_a_cancellation
    run.wait_for_end(run.submit())
    uninterrupted.equals(run)
    assert [run.steps_lost(event) for event in (at_the_limit, cancelled)] == [0, 0]


def test_job_that_is_cancelled_just_before_its_requeue_stays_cancelled(cluster: Cluster) -> None:
    line = ("sbatch", "--parsable", "--requeue", "--output=/dev/null", "--wrap=sleep 60")
    job = cluster.run(*line).stdout.strip()
    cluster.wait_for_state(job, "RUNNING")
    cluster.run("scancel", job)
    code = f"from forge.slurm import slurm; print(slurm.requeue('{job}', 0))"
    assert "it was cancelled meanwhile" in cluster.run("python", "-c", code).stdout
    ended = cluster.wait_for_state(job, "CANCELLED")
    assert ended["Restarts"] == "0"


def test_stop_file_ends_the_job_for_good(new_run: NewRun) -> None:
    run = new_run(ranks_per_node=2)
    job = run.submit()
    event = run.during_pause(PAUSE, run.paths.stop.touch)
    ended = run.wait_for_end(job)
    assert ended["ExitCode"] == "75:0"
    assert ended["Restarts"] == "0"
    [stop] = run.events("stop")
    assert stop["cause"] == "STOP file" and stop["step"] >= PAUSE
    assert [launch for launch in run.events("launch") if launch["time"] > event] == []


def reach_time_limit(cluster: Cluster, run: JobRun, job: str, step: int) -> float:
    """The time limit of a job that is WARNED comes near while the ranks wait before the step; the time
    of that."""
    run.wait_for_pause(step)
    # The limit comes near only now: a busy machine may need longer than any time to reach a step.
    # Between two and three minutes are left, so the signal is due, and nothing is in a hurry.
    hours, minutes, _ = map(int, cluster.job(job)["RunTime"].split(":"))
    limit = hours * 60 + minutes + 3
    event_time = time.time()
    cluster.run("scontrol", "update", f"JobId={job}", f"TimeLimit={limit}")
    run.end_pause_when_told_to_stop(step)
    assert run.wait_for_event("requeue")["cause"] == "SIGUSR1"
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=10")  # one time is enough
    return event_time
