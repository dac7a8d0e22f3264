"""Runs that do not wait for all nodes: they start with what Slurm has, and resume with what is left."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from forge.core.files import read_json
from tools.slurm_cluster.cluster import Cluster

from .job_run import MOST_LOST, PAUSE, PAUSES, JobRun, Uninterrupted, lose, paused
from .project import Project

Nodes = Callable[[int], list[str]]
NewProject = Callable[..., Project]


@pytest.mark.weekly
def test_run_trains_on_the_nodes_that_are_free_at_each_start(
    new_project: NewProject, cluster: Cluster, nodes: Nodes, uninterrupted: Uninterrupted
) -> None:
    first, second = nodes(2)

    def block_second() -> str:
        return cluster.submit(
            "--exclusive", f"--nodelist={second}", "--output=/dev/null", "--wrap=sleep 600"
        )

    def requeue(step: int) -> None:
        cluster.run("scontrol", "requeue", run.events("launch")[0]["job"])
        run.end_pause_when_told_to_stop(step)

    other = block_second()
    cluster.wait_for_state(other, "RUNNING")
    project = new_project(
        on=2,
        train_run={"nodes": 2, "tasks_per_node": 2},
        machine={"slurm": {"nodes_min": 1, "warn_sec": 30}},
    )
    command = project.start(env=paused(30, 50))
    run = project.run()
    run.wait_for_pause(30)
    assert run.events("launch")[0]["nodes"] == [first]
    cluster.run("scancel", other)
    cluster.wait_for_state(other, "CANCELLED")
    requeue(30)
    run.wait_for_pause(50)
    other = block_second()
    requeue(50)
    assert project.end(command) == 0, project.said()
    sizes = [event["world_size"] for event in run.events("launch")]
    assert sizes == [2, 4, 2], project.said()
    assert read_json(run.paths.validated)["status"] == "valid"
    expected = uninterrupted.run(world_size=2).losses()
    losses = {line["step"]: line["loss"] for line in run.train_lines()}
    # Dropout of each rank has its own seed: other numbers of ranks drop other values. The order of the
    # samples is the same, and samples in another order would have losses that differ by more.
    assert losses == pytest.approx(expected, rel=0.02)


def test_run_that_loses_a_node_resumes_on_the_other_and_on_two_again_when_that_is_lost(
    new_run: Callable[..., JobRun], cluster: Cluster, uninterrupted: Uninterrupted
) -> None:
    run = new_run(on=4, pauses=PAUSES[:2])
    run.keys = {"slurm": {"shrink": True}}
    job = run.submit("--no-kill")
    run.wait_for_pause(PAUSES[0])
    first, second = run.events("launch")[0]["nodes"]
    times = [run.during_pause(PAUSES[0], lambda: lose(cluster, second))]
    run.wait_for_pause(PAUSES[1])
    times.append(run.during_pause(PAUSES[1], lambda: lose(cluster, first)))
    ended = run.wait_for_end(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), run.said()
    launches = run.events("launch")
    assert [event["world_size"] for event in launches] == [2, 1, 2]
    assert [event["restart"] for event in launches] == [0, 0, 1]
    assert launches[1]["nodes"] == [first] and not {first, second} & set(launches[2]["nodes"])
    assert max(map(run.steps_lost, times)) <= MOST_LOST
    expected = uninterrupted.run(world_size=2).losses()
    losses = {line["step"]: line["loss"] for line in run.train_lines()}
    assert losses == pytest.approx(expected, rel=0.02)  # as above


@pytest.mark.weekly
def test_job_that_slurm_keeps_without_its_first_node_is_requeued_by_the_waiting_command(
    new_project: NewProject, cluster: Cluster, uninterrupted: Uninterrupted
) -> None:
    project = new_project(on=3, machine={"slurm": {"shrink": True}})
    command = project.start(env=paused())
    run = project.run()
    run.wait_for_pause()
    launch = run.events("launch")[0]
    first, second = launch["nodes"]
    run.during_pause(PAUSE, lambda: lose(cluster, first))
    assert project.end(command) == 0, project.said()
    assert f"has lost its first node, {first}, and is requeued" in project.output()
    last = run.events("launch")[-1]
    assert (last["job"], last["restart"]) == (launch["job"], 1)
    assert second in last["nodes"]
    uninterrupted.equals(run)
