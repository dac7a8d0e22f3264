"""A plugin of the project that is edited while its job waits, on a cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import yaml
from support.project_plugin import HOOKS, LAYERS, write_plugin

from forge.core.files import read_json
from forge.trainer.models.llama_decoder import LlamaDecoder
from tools.slurm_cluster.cluster import Cluster

from .job_run import PAUSE, Uninterrupted, paused, preempt
from .project import Project


def test_plugin_that_is_edited_at_noon_is_as_it_was_for_a_job_that_is_requeued_at_night(
    new_project: Callable[..., Project],
    tiny_config: Path,
    cluster: Cluster,
    uninterrupted: Uninterrupted,
) -> None:
    assert LlamaDecoder.__name__ in LAYERS  # so that the weights are those of the other run
    model = yaml.safe_load(tiny_config.read_text())["model"] | {"architecture": "twin"}
    project = new_project(
        values={"plugins": ["plugins/twin"], "model": model}, train_run={"slurm_partition": "low"}
    )
    write_plugin(project.folder / "plugins/twin")
    command = project.start(env=paused())
    run = project.run()
    run.wait_for_pause(PAUSE)
    write_plugin(project.folder / "plugins/twin", "raise RuntimeError('edited at noon')")
    preempt(cluster, run, PAUSE)
    assert project.end(command) == 0, project.said()
    assert [event["restart"] for event in run.events("launch")] == [0, 1]
    assert read_json(run.paths.validated)["status"] == "valid"
    uninterrupted.equals(run)
    # The next command reads the plugin again: refused here, before anything is submitted.
    jobs = len(project.submitted())
    assert project.end(project.start()) != 0
    assert "plugin twin cannot be imported: RuntimeError: edited at noon" in project.output()
    write_plugin(project.folder / "plugins/twin", HOOKS, f"{LAYERS}# edited\n")
    more = ("--config", "train={max_steps: 300}")
    assert project.end(project.start("train", *more)) != 0
    assert "the plugin twin has digest" in project.output()
    assert len(project.submitted()) == jobs
