"""Nodes, ranks and daemons that are lost in the middle of a training: it goes on by itself, from the
last checkpoint at the latest, and ends with the weights of the uninterrupted run."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest

from tools.slurm_cluster.cluster import Cluster

from .job_run import MOST_LOST, JobRun, Uninterrupted, measure

BOTH = pytest.mark.parametrize("launcher", ["srun", "torchrun"])
NewRun = Callable[..., JobRun]


@BOTH
def test_killed_rank_is_started_again_inside_the_allocation(
    new_run: NewRun, uninterrupted: Uninterrupted, launcher: str
) -> None:
    run = new_run(launcher, ranks_per_node=2)
    job = run.submit()
    run.wait_for_pause()
    event = time.time()
    run.ranks()[-1].send_signal(signal.SIGKILL)
    run.end_pause()
    ended = run.wait_for_end(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "0")
    uninterrupted.equals(run)
    assert measure("a rank killed", run, event)["steps_lost"] <= MOST_LOST


@BOTH
def test_power_cut_sends_the_job_to_other_nodes(
    new_run: NewRun, uninterrupted: Uninterrupted, launcher: str, cluster: Cluster
) -> None:
    run = new_run(launcher, on=3)
    job = run.submit()
    run.wait_for_pause()
    event = time.time()
    cluster.power_cut(run.events("launch")[-1]["nodes"][1])
    run.end_pause()
    ended = run.wait_for_end(job)
    assert ended["JobState"] == "COMPLETED"
    uninterrupted.equals(run)
    assert measure("power cut", run, event)["steps_lost"] <= MOST_LOST


def test_cut_cable_sends_the_job_to_other_nodes(
    new_run: NewRun, uninterrupted: Uninterrupted, cluster: Cluster
) -> None:
    run = new_run(on=3)
    job = run.submit()
    run.wait_for_pause()
    event = time.time()
    cluster.cable_cut(run.events("launch")[-1]["nodes"][1])
    run.end_pause()
    ended = run.wait_for_end(job)
    assert ended["JobState"] == "COMPLETED"
    uninterrupted.equals(run)
    assert measure("cable cut", run, event)["steps_lost"] <= MOST_LOST
