"""The workflow on a cluster: one command from the login node, and what people and clusters do to it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from forge.manifest import read_json

from .cluster import Cluster
from .job_run import GOAL, SCIENCE, Progress, Undisturbed, pending
from .machines import wait_until
from .project import Project

Nodes = Callable[[int], list[str]]
NewProject = Callable[..., Project]
TWO_RANKS = {"nodes": 2, "tasks_per_node": 1}


@pytest.fixture
def new_project(
    cluster: Cluster, nodes: Nodes, science: Path, undisturbed: Undisturbed, shared_folder: Path
) -> NewProject:
    """The project with the tiny science, whose tokens are there already."""
    del undisturbed  # computed before the case begins

    def make(*, on: int = 2, **given: Any) -> Project:
        values = yaml.safe_load(science.read_text()) | given.pop("values", {})
        return Project.make(
            shared_folder / "project",
            cluster,
            values=values,
            names=nodes(on),
            fit=TWO_RANKS | given.pop("fit", {}),
            **given,
        )

    return make


def all_jobs_gone(cluster: Cluster, project: Project, timeout: float) -> None:
    ids = set(project.submitted())
    wait_until(lambda: not ids & {job["id"] for job in cluster.squeue()}, timeout, "an empty queue")


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


def test_ctrl_c_leaves_a_checkpoint_and_no_job_and_the_next_command_goes_on(
    new_project: NewProject, cluster: Cluster, undisturbed: Undisturbed
) -> None:
    project = new_project()
    command = project.start()
    run = project.run()
    run.wait_for_step(50, timeout=120)
    command.press_ctrl_c()
    assert project.end(command) != 0
    all_jobs_gone(cluster, project, 60)
    assert run.events("requeue") == []
    [stop] = run.events("stop")
    assert stop["step"] >= 50
    assert project.end(project.start()) == 0, project.said()
    undisturbed.equals(run)


def test_second_command_after_a_killed_one_names_the_job_that_still_trains(
    new_project: NewProject, undisturbed: Undisturbed
) -> None:
    project = new_project()
    command = project.start()
    project.run().wait_for_step(50, timeout=120)
    command.kill_group()
    again = project.start()
    assert project.end(again, timeout=60) != 0
    job = project.submitted()[-1]
    assert f"job {job} (RUNNING) trains base" in project.output()
    assert f"scancel {job}" in project.output()
    # With the other setting it waits for the job, and does what is left.
    project.edit_machine({"slurm": {"when_running": "wait"}})
    assert project.end(project.start()) == 0, project.said()
    assert len(project.run().events("launch")) == 1
    undisturbed.equals(project.run())
    assert project.run().paths.report.exists()


def test_same_command_given_twice_at_once_trains_once(
    new_project: NewProject, undisturbed: Undisturbed
) -> None:
    project = new_project()
    commands = [project.start(), project.start()]
    codes = [project.end(command) for command in commands]
    assert sorted(map(bool, codes)) == [False, True], project.said()
    refused = project.output(0 if codes[0] else 1)
    assert "is being written by `snakemake`" in refused
    assert len(project.submitted()) == 2  # the allocation and the validation, once
    undisturbed.equals(project.run())
    trained = [line["step"] for line in project.run().train_lines()]
    assert trained == list(range(1, GOAL + 1))


def test_job_in_the_queue_keeps_the_config_it_was_submitted_with(
    new_project: NewProject, cluster: Cluster, undisturbed: Undisturbed
) -> None:
    project = new_project()
    names = sorted(set(cluster.nodes) - set(excluded(project)))
    sleeper = cluster.submit(
        *("--exclusive", f"--nodelist={','.join(names)}", f"--nodes={len(names)}"),
        *("--output=/dev/null", "--wrap=sleep 300"),
    )
    cluster.wait_for_state(sleeper, "RUNNING")
    command = project.start()
    job = project.wait_for_job()
    assert cluster.job(job)["JobState"] == "PENDING"
    config = project.folder / "config/config.yaml"
    values = yaml.safe_load(config.read_text())
    values["train"]["max_steps"] = 7
    config.write_text(yaml.safe_dump(values))
    (project.folder / "config/runs.tsv").write_text("run\nsomething-else\n")
    cluster.run("scancel", sleeper)
    wait_until(
        project.run().paths.fit.exists,
        120,
        "the end of training",
        project.said,
        every=0.2,
    )
    undisturbed.equals(project.run())
    command.press_ctrl_c()
    project.end(command)


def preempted(run: Progress) -> Callable[[], bool]:
    """Whether the ranks of now have been told to leave."""
    ranks = run.ranks()
    return lambda: all(pending(rank, signal.SIGUSR1, signal.SIGTERM) for rank in ranks)


def excluded(project: Project) -> list[str]:
    machine = yaml.safe_load((project.profile_folder / "machine.yaml").read_text())
    return list(machine.get("slurm", {}).get("exclude", []))


def test_job_preempted_in_preflight_and_again_in_training_is_waited_for(
    new_project: NewProject, cluster: Cluster, undisturbed: Undisturbed
) -> None:
    project = new_project(fit={"slurm_partition": "low"})
    command = project.start()
    run = project.run()
    hosts = ",".join(sorted(set(cluster.nodes) - set(excluded(project))))
    first = ("--partition=high", "--exclusive", "--nodes=2", f"--nodelist={hosts}")
    wait_until(run.paths.stage.exists, 120, "staged", project.said, every=0.05)
    cluster.submit(*first, "--output=/dev/null", "--wrap=sleep 2")
    job = project.wait_for_job()
    wait_until(lambda: int(cluster.job(job)["Restarts"]) == 1, 90, "a restart", project.said)
    run.wait_for_step(50, timeout=120)
    cluster.submit(*first, "--output=/dev/null", "--wrap=sleep 2")
    run.hold(preempted(run), timeout=60)  # else it may be through before Slurm has decided
    assert project.end(command, timeout=240) == 0, project.said()
    assert int(cluster.job(job)["Restarts"]) == 2, project.said()
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
    others = excluded(project)
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


def test_profile_that_was_not_edited_is_refused_before_anything_is_submitted(
    new_project: NewProject,
) -> None:
    project = new_project()
    path = project.profile_folder / "config.yaml"
    path.write_text(path.read_text().replace("slurm_account: root", "slurm_account: EDIT_account"))
    assert project.end(project.start(), timeout=60) != 0
    assert "the profile still says slurm_account: EDIT_account" in project.output()
    assert project.submitted() == []
