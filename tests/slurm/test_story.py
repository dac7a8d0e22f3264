"""The whole promise on a real Slurm in one story: text to a validated checkpoint by one command, while
the job is preempted, and then loses a node."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from forge.core.files import read_json
from tools.slurm_cluster.cluster import Cluster

from .job_run import MOST_LOST, PAUSES, Uninterrupted, lose, paused, preempt
from .project import Project

pytestmark = pytest.mark.default


def test_text_becomes_a_validated_checkpoint_though_its_job_is_preempted_and_loses_a_node(
    new_project: Callable[..., Project],
    cluster: Cluster,
    shared_folder: Path,
    uninterrupted: Uninterrupted,
) -> None:
    before_a_preemption, before_a_power_cut, _ = PAUSES
    project = new_project(
        on=3,
        values={"data": str(shared_folder / "data"), "validate": {}},
        train_run={"slurm_partition": "low"},
    )
    command = project.start(env=paused(before_a_preemption, before_a_power_cut))
    run = project.run()
    times = [preempt(cluster, run, before_a_preemption)]
    run.wait_for_pause(before_a_power_cut)
    lost = run.events("launch")[-1]["nodes"][1]
    times.append(run.during_pause(before_a_power_cut, partial(lose, cluster, lost)))
    assert project.end(command) == 0, project.said()
    assert read_json(run.paths.validated)["status"] == "valid", project.said()
    assert run.paths.report.exists()
    launches = run.events("launch")
    assert len({event["job"] for event in launches}) == 1
    assert [event["restart"] for event in launches] == [0, 1, 2]
    assert lost not in launches[-1]["nodes"]
    preempted, cut = map(run.steps_lost, times)
    assert preempted == 0 and cut <= MOST_LOST
    uninterrupted.equals(run)
