"""The workflow on a cluster: one command from the login node, and what people and clusters do to it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from forge.core.files import read_json
from tools.slurm_cluster.cluster import Cluster

from .job_run import SCIENCE, Uninterrupted, paused
from .project import Project

Nodes = Callable[[int], list[str]]
NewProject = Callable[..., Project]
FULL_VALIDATION: dict[str, Any] = {"validate": {}}


def test_raw_text_becomes_a_validated_checkpoint_on_several_nodes(
    new_project: NewProject, shared_folder: Path, uninterrupted: Uninterrupted
) -> None:
    project = new_project(values={"data": str(shared_folder / "data"), **FULL_VALIDATION})
    (project.folder / "config/runs.tsv").write_text("run\ttrain.seed\nbase\t0\nother\t1\n")
    assert project.end(project.start()) == 0, project.said()
    for run in project.runs():
        assert read_json(run.paths.validated)["status"] == "valid"
        assert run.paths.report.exists()
    jobs = {run.events("launch")[-1]["job"] for run in project.runs()}
    assert len(jobs) == 2  # two runs on the same data are two jobs
    uninterrupted.equals(project.run())
    [job] = {event["job"] for event in project.run().events("launch")}
    ranks = sorted(path.name for path in project.run().paths.logs.glob(f"{job}.0.node*.log"))
    assert [name.rsplit(".", 2)[1] for name in ranks] == ["0", "1"]
    assert project.end(project.start()) == 0
    assert "Nothing to be done" in project.output()


def test_job_preempted_before_it_trains_is_waited_for(
    new_project: NewProject, cluster: Cluster, uninterrupted: Uninterrupted
) -> None:
    # No GraceTime: Slurm's signal finds no step yet, and a fast machine would be done before Slurm kills.
    project = new_project(train_run={"slurm_partition": "lownow"})
    command = project.start()
    run = project.run()
    hosts = ",".join(sorted(set(cluster.nodes) - set(project.excluded())))
    job = project.wait_for_job()
    cluster.wait_for_state(job, "RUNNING")
    cluster.submit(  # takes the nodes at once, while the job stages, tests or starts ranks
        *("--partition=high", "--exclusive", "--nodes=2", f"--nodelist={hosts}"),
        *("--output=/dev/null", "--wrap=sleep 2"),
    )
    assert project.end(command) == 0, project.said()
    assert int(cluster.job(job)["Restarts"]) == 1, project.said()
    uninterrupted.equals(run)


def test_accounting_that_is_down_for_half_a_minute_is_not_noticed(
    new_project: NewProject, whole_cluster: Cluster, uninterrupted: Uninterrupted
) -> None:
    project = new_project()
    command = project.start(env=paused())
    project.run().wait_for_pause()
    whole_cluster.stop_daemon("slurmdbd")
    project.run().end_pause()  # the job ends meanwhile, the next one is submitted
    time.sleep(30)  # the case itself: that long it is away
    whole_cluster.start_daemon("slurmdbd")
    assert project.end(command) == 0, project.said()
    uninterrupted.equals(project.run())


def test_kempner_profile_runs_with_only_partition_gpus_and_backend_changed(
    new_project: NewProject, uninterrupted: Uninterrupted
) -> None:
    project = new_project(
        profile="kempner",
        values=FULL_VALIDATION,
        train_run={"gres": "gpu:1"},
        machine={
            "fabric": {"backend": "gloo", "timeout_sec": 60},
            "preflight": {"min_free_disk_gib": 1, "min_free_memory_gib": 1},
        },
    )
    assert project.end(project.start()) == 0, project.said()
    uninterrupted.equals(project.run())


@pytest.mark.parametrize(
    ("profile", "train_run", "machine"),
    [
        ("slurm-cpu", {}, {"launcher": "torchrun"}),
        ("ethernet", {"gres": "gpu:1"}, {"fabric": {"backend": "gloo", "timeout_sec": 60}}),
    ],
)
def test_one_rank_on_one_node_is_no_special_case(
    new_project: NewProject, profile: str, train_run: dict[str, Any], machine: dict[str, Any]
) -> None:
    project = new_project(
        on=1,
        profile=profile,
        train_run={"nodes": 1, "tasks_per_node": 1, **train_run},
        machine=machine,
        values={"train": {**SCIENCE["train"], "max_steps": 20}},
    )
    assert project.end(project.start()) == 0, project.said()
    run = project.run()
    assert read_json(run.paths.validated)["status"] == "valid"
    assert [event["world_size"] for event in run.events("launch")] == [1]


def test_interactive_profile_trains_inside_an_allocation(
    new_project: NewProject, cluster: Cluster, uninterrupted: Uninterrupted
) -> None:
    project = new_project(profile="interactive")
    others = project.excluded()
    command = cluster.popen(
        *("salloc", "--nodes=2", "--ntasks-per-node=1", "--mem=1800", "--time=10"),
        *([f"--exclude={','.join(others)}"] if others else []),
        *("snakemake", "--profile", "profiles/interactive", "train"),
        cwd=project.folder,
    )
    out, _ = command.communicate(timeout=400)
    assert command.returncode == 0, out + project.said()
    uninterrupted.equals(project.run())
    assert project.run().paths.report.exists()


@pytest.mark.parametrize(
    ("section", "wrong", "told"),
    [
        ("default-resources", {"slurm_account": "EDIT_account"}, "still says slurm_account"),
        ("default-resources", {"slurm_account": "nobody"}, "slurm_account nobody"),
        # The partition of the rules without an allocation: told before the training, not after it.
        ("default-resources", {"slurm_partition": "nope"}, "start rule validate_run: sbatch"),
        ("train_run", {"nodes": 50}, "50 nodes, it gives 6 (TotalNodes)"),
        ("train_run", {"runtime": 220}, "set runtime: 40 or less"),
        ("train_run", {"mem_mb": 6000}, "6000 MB a node, 2 of its nodes have 5000"),
        ("train_run", {"task_per_node": 2}, "did you mean tasks_per_node?"),
        (
            "train_run",
            {"tasks_per_node": 3},
            "run base: train.batch_size 4 cannot be shared by a world",
        ),
    ],
)
def test_profile_that_cannot_work_is_refused_before_anything_is_submitted(
    new_project: NewProject, section: str, wrong: dict[str, Any], told: str
) -> None:
    project = new_project(on=0)
    path = project.profile_folder / "config.yaml"
    values = yaml.safe_load(path.read_text())
    (values["set-resources"]["train_run"] if section == "train_run" else values[section]).update(
        wrong
    )
    path.write_text(yaml.safe_dump(values))
    assert project.end(project.start()) != 0
    assert told in project.output(), project.output()
    assert project.submitted() == []


def test_drained_node_is_reported_and_waited_for(new_project: NewProject, cluster: Cluster) -> None:
    project = new_project(on=2)
    name = next(node for node in cluster.nodes if node not in project.excluded())
    update = ("scontrol", "update", f"NodeName={name}")
    cluster.run(*update, "State=DRAIN", "Reason=for a while")
    command = project.start("preflight")
    job = project.wait_for_job()
    assert f"waits in the queue: 1 of 2 nodes that fit are {name} drained" in project.output()
    assert cluster.job(job)["JobState"] == "PENDING"
    cluster.run(*update, "State=RESUME")
    assert project.end(command) == 0, project.said()
