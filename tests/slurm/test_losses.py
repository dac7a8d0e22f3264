"""Nodes, ranks and daemons that are lost in the middle of a training: it goes on by itself, from the
last checkpoint at the latest, and ends with the weights of the undisturbed run."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest

from tools.slurm_cluster.cluster import Cluster

from .job_run import JobRun, Undisturbed, measure

BOTH = pytest.mark.parametrize("launcher", ["srun", "torchrun"])
NewRun = Callable[..., JobRun]
INTERVAL = 200  # steps between checkpoints


@BOTH
def test_killed_rank_is_started_again_inside_the_allocation(
    new_run: NewRun, undisturbed: Undisturbed, launcher: str
) -> None:
    run = new_run(launcher)
    job = run.submit()
    run.wait_for_step(INTERVAL + 50)
    event, step = time.time(), run.step()
    run.ranks()[-1].send_signal(signal.SIGKILL)
    ended = run.wait_for_end(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "0")
    undisturbed.equals(run)
    row = measure("a rank killed", run, event, step)
    assert row["steps_lost"] <= INTERVAL + 50


@BOTH
def test_power_cut_sends_the_job_to_other_nodes(
    new_run: NewRun, undisturbed: Undisturbed, launcher: str, cluster: Cluster
) -> None:
    run = new_run(launcher, on=3)
    job = run.submit()
    run.wait_for_step(INTERVAL + 50)
    event, step = time.time(), run.step()
    cluster.power_cut(run.events("launch")[-1]["nodes"][1])
    ended = run.wait_for_end(job)
    assert ended["JobState"] == "COMPLETED"
    undisturbed.equals(run)
    assert measure("power cut", run, event, step)["steps_lost"] <= INTERVAL + 50


def test_cut_cable_sends_the_job_to_other_nodes(
    new_run: NewRun, undisturbed: Undisturbed, cluster: Cluster
) -> None:
    run = new_run(on=3)
    job = run.submit()
    run.wait_for_step(INTERVAL + 50)
    event, step = time.time(), run.step()
    cluster.cable_cut(run.events("launch")[-1]["nodes"][1])
    ended = run.wait_for_end(job)
    assert ended["JobState"] == "COMPLETED"
    undisturbed.equals(run)
    assert measure("cable cut", run, event, step)["steps_lost"] <= INTERVAL + 50
