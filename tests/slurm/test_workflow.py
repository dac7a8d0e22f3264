"""The workflow on a cluster: one command from the login node, and what people and clusters do to it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forge.manifest import read_json

from .cluster import Cluster
from .job_run import SCIENCE, Progress, Undisturbed, pending
from .project import Project

Nodes = Callable[[int], list[str]]
NewProject = Callable[..., Project]


def test_raw_text_becomes_a_validated_checkpoint_on_several_nodes(
    new_project: NewProject, shared_folder: Path, undisturbed: Undisturbed
) -> None:
    project = new_project(values={"data": str(shared_folder / "data")})
    (project.folder / "config/runs.tsv").write_text("run\ttrain.seed\nbase\t0\nother\t1\n")
    assert project.end(project.start()) == 0, project.said()
    for run in project.runs():
        assert read_json(run.paths.validated)["status"] == "valid"
        assert run.paths.report.exists()
    jobs = {run.events("launch")[-1]["job"] for run in project.runs()}
    assert len(jobs) == 2  # two runs on the same data are two jobs
    undisturbed.equals(project.run())
    [job] = {event["job"] for event in project.run().events("launch")}
    ranks = sorted(path.name for path in project.run().paths.logs.glob(f"{job}.0.node*.log"))
    assert [name.rsplit(".", 2)[1] for name in ranks] == ["0", "1"]
    assert project.end(project.start()) == 0
    assert "Nothing to be done" in project.output()


def preempted(run: Progress) -> Callable[[], bool]:
    """Whether the ranks of now have been told to leave."""
    ranks = run.ranks()
    return lambda: all(pending(rank, signal.SIGUSR1, signal.SIGTERM) for rank in ranks)


def test_job_preempted_before_it_trains_is_waited_for(
    new_project: NewProject, cluster: Cluster, undisturbed: Undisturbed
) -> None:
    project = new_project(fit={"slurm_partition": "low"})
    command = project.start()
    run = project.run()
    hosts = ",".join(sorted(set(cluster.nodes) - set(project.excluded())))
    job = project.wait_for_job()
    cluster.wait_for_state(job, "RUNNING")
    cluster.submit(  # decides within a second or some, while the job stages, tests or starts ranks
        *("--partition=high", "--exclusive", "--nodes=2", f"--nodelist={hosts}"),
        *("--output=/dev/null", "--wrap=sleep 2"),
    )
    assert project.end(command, timeout=240) == 0, project.said()
    assert int(cluster.job(job)["Restarts"]) == 1, project.said()
    undisturbed.equals(run)


def test_accounting_that_is_down_for_half_a_minute_is_not_noticed(
    new_project: NewProject, whole_cluster: Cluster, undisturbed: Undisturbed
) -> None:
    project = new_project()
    command = project.start()
    project.run().wait_for_step(50, timeout=120)
    whole_cluster.stop_daemon("slurmdbd")
    time.sleep(30)  # the case itself: that long it is away
    whole_cluster.start_daemon("slurmdbd")
    assert project.end(command, timeout=240) == 0, project.said()
    undisturbed.equals(project.run())


def test_kempner_profile_runs_with_only_partition_gpus_and_backend_changed(
    new_project: NewProject, undisturbed: Undisturbed
) -> None:
    project = new_project(
        profile="kempner",
        fit={"gres": "gpu:1"},
        machine={
            "fabric": {"backend": "gloo", "timeout_sec": 60},
            "preflight": {"min_free_disk_gib": 1, "min_free_memory_gib": 1},
        },
    )
    assert project.end(project.start()) == 0, project.said()
    undisturbed.equals(project.run())


@pytest.mark.parametrize(
    ("profile", "fit", "machine"),
    [
        ("slurm-cpu", {}, {"launcher": "torchrun"}),
        ("ethernet", {"gres": "gpu:1"}, {"fabric": {"backend": "gloo", "timeout_sec": 60}}),
    ],
)
def test_one_rank_on_one_node_is_no_special_case(
    new_project: NewProject, profile: str, fit: dict[str, Any], machine: dict[str, Any]
) -> None:
    project = new_project(
        on=1,
        profile=profile,
        fit={"nodes": 1, "tasks_per_node": 1, **fit},
        machine=machine,
        values={"train": {**SCIENCE["train"], "max_steps": 20}},
    )
    assert project.end(project.start()) == 0, project.said()
    run = project.run()
    assert read_json(run.paths.validated)["status"] == "valid"
    assert [event["world_size"] for event in run.events("launch")] == [1]


def test_interactive_profile_trains_inside_an_allocation(
    new_project: NewProject, cluster: Cluster, undisturbed: Undisturbed
) -> None:
    project = new_project(profile="interactive")
    others = project.excluded()
    command = cluster.popen(
        *("salloc", "--nodes=2", "--ntasks-per-node=1", "--mem=1800", "--time=10"),
        *([f"--exclude={','.join(others)}"] if others else []),
        *("snakemake", "--profile", "profiles/interactive", "train"),
        cwd=project.folder,
    )
    out, _ = command.communicate(timeout=200)
    assert command.returncode == 0, out + project.said()
    undisturbed.equals(project.run())
    assert project.run().paths.report.exists()


@pytest.mark.parametrize(
    ("line", "wrong", "told"),
    [
        ("slurm_account: root", "slurm_account: EDIT_account", "still says slurm_account"),
        ("slurm_account: root", "slurm_account: nobody", "slurm_account nobody"),
        ("slurm_partition: main", "slurm_partition: nope", "Invalid partition name"),
        ("nodes: 2", "nodes: 50", "Requested node configuration is not available"),
    ],
)
def test_profile_that_cannot_work_is_refused_before_anything_is_submitted(
    new_project: NewProject, line: str, wrong: str, told: str
) -> None:
    project = new_project(values={"train": {**SCIENCE["train"], "batch_size": 50}})
    path = project.profile_folder / "config.yaml"
    path.write_text(path.read_text().replace(line, wrong))
    assert project.end(project.start(), timeout=60) != 0
    assert told in project.output()
    assert project.submitted() == []
