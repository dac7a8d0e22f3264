"""Nodes and daemons that are silent while Slurm has noticed nothing: nobody else may use the cluster."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

import pytest

from tools.slurm_cluster.cluster import Cluster
from tools.slurm_cluster.machines import wait_until

from .job_run import MOST_LOST, JobRun, Uninterrupted, measure

NewRun = Callable[..., JobRun]


@pytest.mark.parametrize("cut", ["power_cut", "cable_cut"])
def test_ranks_leave_a_silent_node_before_slurm_has_noticed(
    new_run: NewRun, uninterrupted: Uninterrupted, whole_cluster: Cluster, cut: str
) -> None:
    whole_cluster.configure(SlurmdTimeout=600)
    run = new_run(on=4)
    job = run.submit()
    run.wait_for_pause()
    event = time.time()
    lost = run.events("launch")[-1]["nodes"][1]
    getattr(whole_cluster, cut)(lost)
    run.end_pause()
    assert run.wait_for_event("lost", timeout=120)["silent"] == [lost]
    assert run.wait_for_event("requeue", timeout=60)["cause"] == "peer lost"
    assert lost in run.paths.bad_nodes.read_text()
    # Slurm keeps the job back until the lost node has answered, or is declared dead.
    whole_cluster.run("scontrol", "update", f"NodeName={lost}", "State=DOWN", "Reason=lost")
    ended = run.wait_for_end(job)
    assert ended["JobState"] == "COMPLETED"
    uninterrupted.equals(run)
    row = measure(f"{cut.replace('_', ' ')}, Slurm slow to notice", run, event)
    assert row["steps_lost"] <= MOST_LOST


def test_spare_node_takes_over_without_the_queue(
    new_run: NewRun, uninterrupted: Uninterrupted, whole_cluster: Cluster
) -> None:
    whole_cluster.configure(SlurmdTimeout=600)
    run = new_run(on=3)
    run.submit("--no-kill", nodes=3)
    run.wait_for_pause()
    event = time.time()
    hosts = run.events("launch")[-1]["nodes"]
    whole_cluster.power_cut(hosts[1])
    run.end_pause()
    again = run.wait_for_event("launch", 2, timeout=120)
    assert hosts[1] not in again["nodes"] and len(again["nodes"]) == 2
    wait_until(run.paths.trained.exists, 120, "the end of training", run.said, every=0.1)
    assert run.events("requeue") == []
    uninterrupted.equals(run)
    assert measure("power cut, spare node", run, event)["steps_lost"] <= MOST_LOST


def test_restarted_controller_is_not_noticed(
    new_run: NewRun, uninterrupted: Uninterrupted, whole_cluster: Cluster
) -> None:
    run = new_run()
    job = run.submit()
    run.wait_for_pause()
    whole_cluster.restart_slurmctld()
    run.end_pause()
    ended = run.wait_for_end(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "0")
    assert len(run.events("launch")) == 1
    uninterrupted.equals(run)


def test_stop_while_the_controller_is_away_still_requeues_the_job(
    new_run: NewRun, uninterrupted: Uninterrupted, whole_cluster: Cluster
) -> None:
    run = new_run()
    job = run.submit()
    run.wait_for_pause()
    event = time.time()
    whole_cluster.stop_daemon("slurmctld")
    back = threading.Timer(8, whole_cluster.start_daemon, ["slurmctld"])
    back.start()
    for rank in run.ranks():
        rank.send_signal(signal.SIGTERM)
    run.end_pause()
    run.wait_for_event("requeue", timeout=60)
    back.join(60)
    run.wait_for_end(job)
    uninterrupted.equals(run)
    assert measure("SIGTERM, controller away for 8 s", run, event)["steps_lost"] == 0
