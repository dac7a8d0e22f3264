"""Plugins of the project on a cluster: one that is edited while its job waits, and checks of nodes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from support.project_plugin import HOOKS, LAYERS, write_documented, write_plugin
from support.repository import REPOSITORY
from support.wet import wet_gz

from forge.core.files import read_json
from forge.trainer.models.llama_decoder import LlamaDecoder
from tools.slurm_cluster.cluster import Cluster

from .job_run import PAUSE, Uninterrupted, paused, preempt
from .project import Project

NewProject = Callable[..., Project]


@pytest.mark.weekly
def test_plugin_that_is_edited_at_noon_is_as_it_was_for_a_job_that_is_requeued_at_night(
    new_project: NewProject,
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


def test_node_that_a_check_of_the_project_fails_is_left_out_and_a_spare_one_trains(
    new_project: Callable[..., Project], cluster: Cluster
) -> None:
    project = new_project(
        values={"plugins": ["plugins/lab_node.py"]},
        machine={"preflight": {"spare_nodes": 1}},
        train_run={"slurm_partition": "low", "nodes": 1},
    )
    healthy, other = sorted({*cluster.nodes} - {*project.excluded()})
    plugin = write_documented(project.folder, "plugins/lab_node.py")
    scratch = project.folder / "scratch"
    text = plugin.read_text().replace("os.path.ismount(SCRATCH)", "os.uname().nodename != OTHER")
    plugin.write_text(text.replace('"/scratch"', f'"{scratch}"; OTHER = "{other}"'))
    assert project.end(project.start()) == 0, project.said()
    run = project.run()
    assert run.events("preflight")[-1]["left_out"].keys() == {other}
    assert f"{scratch} is not mounted" in run.events("preflight")[-1]["left_out"][other]
    assert run.events("launch")[0]["nodes"] == [healthy]
    assert read_json(run.paths.validated)["status"] == "valid"


def test_rule_and_tracker_of_the_project_are_as_they_were_submitted(
    new_project: Callable[..., Project],
) -> None:
    own = ["plugins/losses", "plugins/lab_file.py"]
    project = new_project(values={"plugins": own, "tracking": {"lab_file": {}}}, on=1)
    files = ("losses/hooks.py", "losses/rules.smk", "losses/table.py", "lab_file.py")
    paths = [write_documented(project.folder, f"plugins/{name}") for name in files]
    command = project.start(env=paused())
    run = project.run()
    run.wait_for_pause(PAUSE)
    for path in paths:
        path.write_text("raise RuntimeError('edited at noon')")
    run.end_pause(PAUSE)
    assert project.end(command) == 0, project.said()
    table = (run.paths.root / "losses.tsv").read_text().splitlines()
    assert len(table) == len(run.losses())
    assert len(project.submitted()) == 3  # of training, validation and the rule
    lines = (project.folder / "lab.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [*range(len(table) + 1)]
    assert run.events("plugins")[0]["used"].keys() == {"losses", "lab_file"}


def test_text_format_that_is_edited_while_its_job_waits_is_as_it_was_submitted(
    new_project: NewProject, cluster: Cluster
) -> None:
    corpus = {"inputs": ["crawl"], "format": "wet", "val_fraction": 0.2}
    project = new_project(values={"plugins": ["plugins/wet"], "data": "data", "tokenize": corpus})
    profile = project.profile_folder / "config.yaml"
    values = yaml.safe_load(profile.read_text())
    extra = f"--hold --exclude={','.join(project.excluded())}"
    values["set-resources"]["tokenize"] = {"slurm_extra": f"'{extra}'"}
    profile.write_text(yaml.safe_dump(values))
    wet = project.folder / "plugins/wet"
    shutil.copytree(REPOSITORY / "examples/plugins/wet", wet)
    (project.folder / "crawl").mkdir()
    pages = [f"page {number} " + "words of it " * 20 for number in range(60)]
    (project.folder / "crawl/a.warc.wet.gz").write_bytes(wet_gz(pages))
    command = project.start()
    job = project.wait_for_job()
    [copy] = (project.folder / ".snakemake/forge/plugins").iterdir()
    for name in ("hooks", "reader"):
        (wet / f"{name}.py").write_text("raise RuntimeError('edited while it waits')")
    cluster.run("scontrol", "release", job)
    assert project.end(command) == 0, project.said()
    config = read_json(project.run().paths.config)
    assert config["tokenize"]["format"] == f"wet@wet:{copy.name}"
    tokens = read_json(project.folder / f"data/tokens/{config['ids']['tokens']}/manifest.json")
    assert tokens["settings"]["format"] == f"wet@wet:{copy.name}"
    assert sum(total["documents"] for total in tokens["totals"].values()) == len(pages)
