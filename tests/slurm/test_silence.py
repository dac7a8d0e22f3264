"""Nodes and daemons that are silent while Slurm has noticed nothing: nobody else may use the cluster."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

from tools.slurm_cluster.cluster import Cluster

from .job_run import MOST_LOST, PAUSES, JobRun, Uninterrupted

NewRun = Callable[..., JobRun]


def test_ranks_leave_silent_nodes_before_slurm_has_noticed_first_for_a_spare_then_by_a_requeue(
    new_run: NewRun, uninterrupted: Uninterrupted, whole_cluster: Cluster
) -> None:
    whole_cluster.configure(SlurmdTimeout=600)
    before_a_power_cut, before_a_cable_cut, _ = PAUSES
    run = new_run(on=5, pauses=(before_a_power_cut, before_a_cable_cut))
    job = run.submit("--no-kill", nodes=3)
    run.wait_for_pause(before_a_power_cut)
    dark = run.events("launch")[-1]["nodes"][1]
    times = [run.during_pause(before_a_power_cut, lambda: whole_cluster.power_cut(dark))]
    assert run.wait_for_event("lost", timeout=120)["silent"] == [dark]
    run.wait_for_pause(before_a_cable_cut)
    with_spare = run.events("launch")[-1]["nodes"]
    assert dark not in with_spare and len(with_spare) == 2
    assert run.events("requeue") == []  # the spare node took over without the queue
    cut = with_spare[1]
    times.append(run.during_pause(before_a_cable_cut, lambda: whole_cluster.cable_cut(cut)))
    assert run.wait_for_event("lost", 2, timeout=120)["silent"] == [cut]
    assert run.wait_for_event("requeue", timeout=60)["cause"] == "peer lost"
    assert {dark, cut} <= set(run.paths.bad_nodes.read_text().split())
    # Slurm keeps the job back until the lost nodes have answered, or are declared dead.
    lost = f"NodeName={dark},{cut}"
    whole_cluster.run("scontrol", "update", lost, "State=DOWN", "Reason=lost")
    assert run.wait_for_end(job)["JobState"] == "COMPLETED"
    uninterrupted.equals(run)
    assert max(map(run.steps_lost, times)) <= MOST_LOST


def test_restarted_controller_is_not_noticed_and_a_stop_while_it_is_away_requeues_the_job(
    new_run: NewRun, uninterrupted: Uninterrupted, whole_cluster: Cluster
) -> None:
    before_a_restart, before_a_stop, _ = PAUSES
    run = new_run(pauses=(before_a_restart, before_a_stop))
    job = run.submit()
    run.during_pause(before_a_restart, whole_cluster.restart_slurmctld)
    run.wait_for_pause(before_a_stop)
    assert len(run.events("launch")) == 1
    assert whole_cluster.job(job)["Restarts"] == "0"

    back = threading.Timer(8, whole_cluster.start_daemon, ["slurmctld"])

    def stop_while_it_is_away() -> None:
        whole_cluster.stop_daemon("slurmctld")
        back.start()
        for rank in run.ranks():
            rank.send_signal(signal.SIGTERM)

    stopped = run.during_pause(before_a_stop, stop_while_it_is_away)
    run.wait_for_event("requeue", timeout=60)
    back.join(60)
    ended = run.wait_for_end(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1")
    uninterrupted.equals(run)
    assert run.steps_lost(stopped) == 0
