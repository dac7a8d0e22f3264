"""Commands that people give at night: Ctrl-C, a killed login process, the same command twice, an edit
while the job waits. One trainer at the most, and the weights of the uninterrupted run."""

from __future__ import annotations

from collections.abc import Callable

import yaml

from tools.slurm_cluster.cluster import Cluster
from tools.slurm_cluster.machines import login_environment, wait_until

from .job_run import GOAL, PAUSE, Uninterrupted, paused
from .project import Project

Nodes = Callable[[int], list[str]]
NewProject = Callable[..., Project]


def all_jobs_gone(cluster: Cluster, project: Project, timeout: float) -> None:
    ids = set(project.submitted())
    wait_until(
        lambda: not ids & {job["id"] for job in cluster.squeue()},
        timeout,
        "an empty queue",
        every=0.5,
    )


def test_ctrl_c_leaves_a_checkpoint_and_no_job_and_the_next_command_resumes_on_other_nodes(
    new_project: NewProject, cluster: Cluster, uninterrupted: Uninterrupted
) -> None:
    """And what was exported before the command reaches every rank."""
    exported = {"NCCL_DEBUG": "INFO", "HF_HOME": "/of/mine", "MY_OWN": "a b"}
    project = new_project(on=4)
    command = project.start(env=paused() | exported)
    run = project.run()
    run.wait_for_pause()
    environments = [rank.environ() for rank in run.ranks()]
    assert [{name: each.get(name) for name in exported} for each in environments] == [exported] * 2
    command.press_ctrl_c()
    run.end_pause_when_told_to_stop()
    assert project.end(command) != 0
    all_jobs_gone(cluster, project, 60)
    # Slurm forgets a cancelled job while its batch script still ends.
    assert run.wait_for_event("stop")["step"] >= PAUSE
    assert run.events("requeue") == []
    used = run.events("launch")[-1]["nodes"]
    project.edit_machine({"slurm": {"exclude": [*project.excluded(), *used]}})
    assert project.end(project.start()) == 0, project.said()
    assert not set(used) & set(run.events("launch")[-1]["nodes"])
    checked = [event["nodes"] for event in run.events("preflight")]
    assert checked == [event["nodes"] for event in run.events("launch")]
    uninterrupted.equals(run)


SLOW_SBATCH = """#!/bin/bash
case "$*" in *--test-only*) exec /usr/bin/sbatch "$@" ;; esac
trap "" INT
touch asked
while [ ! -e pressed ]; do sleep 0.1; done
/usr/bin/sbatch "$@" | tee id
"""


def test_job_that_sbatch_submits_while_ctrl_c_comes_is_cancelled(
    new_project: NewProject, cluster: Cluster
) -> None:
    project = new_project(machine={"slurm": {"options": "--hold"}})
    shim = project.folder / "bin/sbatch"
    shim.parent.mkdir()
    shim.write_text(SLOW_SBATCH)
    shim.chmod(0o755)
    path = f"{shim.parent}:{login_environment()['PATH']}"
    command = project.start("preflight", env={"PATH": path})
    asked, pressed, job = (project.folder / name for name in ("asked", "pressed", "id"))
    wait_until(asked.exists, 60, "sbatch", project.said, every=0.1)
    command.press_ctrl_c()
    words = "Terminating processes on user request"
    wait_until(lambda: words in project.output(), 60, words, project.said, every=0.1)
    pressed.touch()
    assert project.end(command) != 0
    state = cluster.job(job.read_text().strip())["JobState"]
    assert state == "CANCELLED", project.said()


def test_same_command_twice_at_once_trains_once_and_after_a_kill_the_next_names_the_job(
    new_project: NewProject, uninterrupted: Uninterrupted
) -> None:
    """On one node, with one rank of torchrun: no special case."""
    project = new_project(on=1, machine={"launcher": "torchrun"})
    commands = [project.start(env=paused()) for _ in range(2)]
    project.run().wait_for_pause()
    wait_until(
        lambda: sum(command.poll() is None for command in commands) == 1,
        60,
        "the end of one command",
        project.said,
        every=0.2,
    )
    refused = project.output(0 if commands[0].poll() else 1)
    assert "is being written by `snakemake`" in refused
    for command in commands:
        command.kill_group()

    again = project.start()
    assert project.end(again) != 0
    [job] = project.submitted()
    assert f"job {job} (RUNNING) trains base" in project.output()
    assert f"scancel {job}" in project.output()

    # With the other setting it waits for the job, and does what is left.
    project.edit_machine({"slurm": {"when_running": "wait"}})
    third = project.start()
    wait_until(
        lambda: "waiting: " in project.output(),
        60,
        "waiting for the job",
        project.said,
        every=0.2,
    )
    project.run().end_pause()
    assert project.end(third) == 0, project.said()
    assert len(project.submitted()) == 2  # the allocation and the validation, once
    assert [launch["world_size"] for launch in project.run().events("launch")] == [1]
    uninterrupted.equals(project.run())
    trained = [line["step"] for line in project.run().train_lines()]
    assert trained == list(range(1, GOAL + 1))
    assert project.run().paths.report.exists()


def test_job_in_the_queue_keeps_the_config_it_was_submitted_with(
    new_project: NewProject, cluster: Cluster, uninterrupted: Uninterrupted
) -> None:
    project = new_project(on=1)
    names = sorted(set(cluster.nodes) - set(project.excluded()))
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
        project.run().paths.trained.exists,
        120,
        "the end of training",
        project.said,
        every=0.2,
    )
    uninterrupted.equals(project.run())
    command.kill_group()  # it waits for validation in its own time
