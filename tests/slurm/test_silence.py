"""Nodes and daemons that are silent while Slurm has noticed nothing: nobody else may use the cluster."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable

import pytest

from forge.core.files import read_json
from tools.slurm_cluster.cluster import Cluster
from tools.slurm_cluster.machines import wait_until

from .job_run import INTERVAL, MOST_LOST, PAUSES, JobRun, Uninterrupted, paused
from .project import Project

NewRun = Callable[..., JobRun]
NewProject = Callable[..., Project]


@pytest.mark.weekly
def test_ranks_leave_silent_nodes_before_slurm_has_noticed_first_for_a_spare_then_by_a_requeue(
    new_run: NewRun, uninterrupted: Uninterrupted, exclusive_cluster: Cluster
) -> None:
    exclusive_cluster.configure(SlurmdTimeout=600)
    before_a_power_cut, before_a_cable_cut, _ = PAUSES
    run = new_run(on=5, pauses=(before_a_power_cut, before_a_cable_cut))
    job = run.submit("--no-kill", nodes=3)
    run.wait_for_pause(before_a_power_cut)
    dark = run.events("launch")[-1]["nodes"][1]
    times = [run.during_pause(before_a_power_cut, lambda: exclusive_cluster.power_cut(dark))]
    assert run.wait_for_event("lost", timeout=120)["silent"] == [dark]
    run.wait_for_pause(before_a_cable_cut)
    with_spare = run.events("launch")[-1]["nodes"]
    assert dark not in with_spare and len(with_spare) == 2
    assert run.events("requeue") == []  # the spare node took over without the queue
    cut = with_spare[1]
    times.append(run.during_pause(before_a_cable_cut, lambda: exclusive_cluster.cable_cut(cut)))
    lost = run.wait_for_event("lost", 2, timeout=120)
    assert lost["silent"] == [cut]
    # Both ranks have waited in the same collective; the launcher's own node is not called cut off.
    assert re.match(
        rf"rank \d of 2 on {cut} did not arrive .* cut off|{cut} starts no", lost["message"]
    )
    assert run.wait_for_event("requeue", timeout=60)["cause"] == "peer lost"
    assert {dark, cut} <= set(run.paths.bad_nodes.read_text().split())
    # Slurm keeps the job back until the lost nodes have answered, or are declared dead.
    both = f"NodeName={dark},{cut}"
    exclusive_cluster.run("scontrol", "update", both, "State=DOWN", "Reason=lost")
    assert run.wait_for_end(job)["JobState"] == "COMPLETED"
    uninterrupted.equals(run)
    assert max(map(run.steps_lost, times)) <= MOST_LOST


# Seconds for which the controller is away: a restart, and one that takes longer than srun waits for it.
# The second one takes minutes: FORGE_ABSENCES=all (make absences).
ABSENCES = [
    pytest.param(3, marks=pytest.mark.weekly),
    pytest.param(
        22,
        marks=[
            pytest.mark.skipif(
                os.environ.get("FORGE_ABSENCES") != "all", reason="FORGE_ABSENCES=all"
            ),
        ],
    ),
]
COMMANDS = ("stage", "preflight", "train")


@pytest.mark.parametrize("seconds", ABSENCES)
def test_controller_that_restarts_at_any_moment_of_a_run_ends_nothing_and_blames_no_node(
    new_project: NewProject, exclusive_cluster: Cluster, uninterrupted: Uninterrupted, seconds: int
) -> None:
    before_a_save, before_a_stop = 2 * INTERVAL, 2 * INTERVAL + 10
    project = new_project(machine={"stage": {"mode": "always"}})
    hold = project.folder / "hold"
    hold.mkdir()
    for name in COMMANDS:
        (hold / f"{name}-hold").touch()
    command = project.start(
        env={**paused(before_a_save, before_a_stop), "FORGE_TEST_HOLD": str(hold)}
    )
    run = project.run()

    def away(go_on: Callable[[], object]) -> None:
        """The controller is away when the run goes on, and for some seconds from then."""
        exclusive_cluster.stop_daemon("slurmctld")
        go_on()
        time.sleep(seconds)  # the case itself
        exclusive_cluster.start_daemon("slurmctld")

    for name in COMMANDS:
        waits = (hold / f"{name}-waiting").exists
        wait_until(waits, 240, f"{name} waits", project.said, every=0.1)
        away((hold / f"{name}-over").touch)
    run.wait_for_pause(before_a_save)
    away(lambda: run.end_pause(before_a_save))
    run.wait_for_pause(before_a_stop)

    def stop() -> None:
        ranks = run.ranks()
        assert len(ranks) == 2
        for rank in ranks:
            rank.send_signal(signal.SIGTERM)
        run.end_pause_when_told_to_stop(before_a_stop)

    away(stop)
    assert project.end(command) == 0, project.said()
    assert read_json(run.paths.validated)["status"] == "valid"
    uninterrupted.equals(run)
    assert len(run.events("launch")) == 2 and len(run.events("requeue")) == 1
    assert run.events("lost") == run.events("failed") == []
    assert {event["status"] for event in run.events("preflight")} == {"ok"}
    assert not run.paths.bad_nodes.exists()
    assert exclusive_cluster.job(project.submitted()[0])["Restarts"] == "1"
