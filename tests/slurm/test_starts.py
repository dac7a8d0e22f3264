"""Threat: two starts of one job, or two jobs that run one command, write the same run; a command inside
of a job that leaves a lock which nobody can judge."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import psutil
import pytest

from tools.slurm_cluster.cluster import Cluster
from tools.slurm_cluster.machines import wait_until

from .job_run import Uninterrupted, batch_steps_of, paused
from .project import Project

NewProject = Callable[..., Project]


@pytest.mark.weekly
def test_start_of_a_job_that_slurm_took_for_dead_ends_when_a_later_one_has_the_run(
    new_project: NewProject, cluster: Cluster, uninterrupted: Uninterrupted
) -> None:
    """The slurmd of its node hangs. It took the later start's number and lock, which was then refused
    with advice to cancel its own job; and Snakemake removed the later start's records."""
    project = new_project(on=2, train_run={"nodes": 1})
    command = project.start(env=paused())
    job = project.wait_for_job()
    run = project.run()
    wait_until(run.paths.stage.is_file, 60, "the record of stage", project.said, every=0.05)
    [early] = batch_steps_of(job)
    early.suspend()
    node = cluster.job(job)["NodeList"]
    cluster.run("pkill", "-STOP", "-x", "slurmd", machine=node, cwd="/")
    try:
        run.wait_for_pause()
        assert run.events("launch")[-1]["restart"] == 1
        early.resume()
        psutil.wait_procs([early], timeout=60)
        assert not early.is_running()
        assert run.paths.stage.is_file() and run.paths.preflight_pass.is_file()
        run.end_pause()
        assert project.end(command) == 0, project.said()
    finally:
        cluster.run("pkill", "-CONT", "-x", "slurmd", machine=node, cwd="/")
    assert len(project.submitted()) == 2  # and validation
    uninterrupted.equals(run)


def from_a_job(project: Project, *options: str, env: dict[str, str] | None = None) -> str:
    """The id of a job of the user that runs `snakemake train` itself."""
    line = f"exec snakemake --profile profiles/{project.profile} train"
    return project.cluster.submit(
        *("--output=own-%j.out", f"--exclude={','.join(project.excluded())}", *options),
        f"--wrap={line}",
        cwd=project.folder,
        env=env,
    )


@pytest.mark.weekly
def test_snakemake_in_a_job_of_the_user_is_taken_over_from_when_that_job_has_ended(
    new_project: NewProject, cluster: Cluster, uninterrupted: Uninterrupted
) -> None:
    project = new_project(on=2, train_run={"nodes": 1})
    own = from_a_job(project, env=paused())
    run = project.run()
    run.wait_for_pause()
    refused = project.start()
    assert project.end(refused) != 0 and f"Slurm job {own}" in project.output()
    assert ".workflow-lock" not in project.output()
    cluster.run("scancel", "--signal=KILL", "--full", own)
    cluster.wait_for_state(own, "FAILED CANCELLED")
    [job] = [job["id"] for job in cluster.squeue()]  # goes on without its Snakemake
    run.end_pause()
    cluster.wait_for_state(job, "COMPLETED")
    assert project.end(project.start()) == 0, project.said()
    uninterrupted.equals(run)


@pytest.mark.weekly
def test_tasks_of_an_array_that_all_give_the_command_are_told_so_and_one_trains(
    new_project: NewProject, cluster: Cluster, uninterrupted: Uninterrupted
) -> None:
    project = new_project(on=2, train_run={"nodes": 1})
    array = from_a_job(project, "--array=1-3")
    states = []

    def ended() -> bool:
        tasks = cluster.run("scontrol", "show", "job", "--oneliner", array).stdout.splitlines()
        states[:] = [line.partition("JobState=")[2].split()[0] for line in tasks]
        return set(states) <= {"COMPLETED", "FAILED"}

    wait_until(ended, 240, "the end of all tasks", lambda: f"{states} {project.said()}", every=0.5)
    assert sorted(states) == ["COMPLETED", "FAILED", "FAILED"]
    said = [path.read_text() for path in project.folder.glob("own-*.out")]
    assert sum("another task of this job array" in text for text in said) == 2
    uninterrupted.equals(project.run())


def test_command_in_a_job_that_holds_whole_nodes_says_that_its_jobs_need_others(
    new_project: NewProject, cluster: Cluster
) -> None:
    project = new_project(on=2)
    own = from_a_job(project, "--nodes=2", "--exclusive")
    output = project.folder / f"own-{own}.out"

    def said() -> bool:
        return (
            output.is_file() and "The jobs that it submits need other nodes" in output.read_text()
        )

    wait_until(said, 60, "the warning", lambda: output.read_text()[-2000:], every=0.2)
    cluster.run("scancel", "--full", own)


@pytest.mark.weekly
def test_job_that_is_suspended_before_it_trains_goes_on_and_blames_no_node(
    new_project: NewProject, cluster: Cluster, uninterrupted: Uninterrupted
) -> None:
    """By gang scheduling, or an administrator, for longer than any wait for a node."""
    project = new_project()
    command = project.start()
    job = project.wait_for_job()
    run = project.run()

    log = run.paths.logs / "preflight.log"
    begins = "s for the nodes"
    wait_until(
        lambda: log.is_file() and begins in log.read_text(), 90, begins, project.said, every=0.01
    )
    cluster.run("scontrol", "suspend", job)
    time.sleep(int(log.read_text().partition(begins)[0].split()[-1]) + 15)  # the case itself
    cluster.run("scontrol", "resume", job)
    assert project.end(command) == 0, project.said()
    # Whether a wait ran out, and which, depends on how far the job came: test_requeue has the words.
    assert not run.paths.bad_nodes.exists()
    uninterrupted.equals(run)


def imports_of_torch(job: str) -> list[psutil.Process]:
    """Imports by which preflight tries torch on the job's nodes."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.cmdline()[1:] == ["-c", "import torch.distributed"]:
                found += [process] * (process.environ().get("SLURM_JOB_ID") == job)
    return found


@pytest.mark.weekly
def test_job_that_is_preempted_while_its_nodes_import_torch_goes_on_and_blames_no_node(
    new_project: NewProject, cluster: Cluster, uninterrupted: Uninterrupted
) -> None:
    """Slurm's signal ended the import, and the node was excluded for a day."""
    project = new_project(train_run={"slurm_partition": "low"})
    command = project.start(env=paused())  # or the run would end before its nodes are taken
    job = project.wait_for_job()
    run = project.run()

    wait_until(lambda: imports_of_torch(job), 90, "torch", project.said, every=0.01)
    stopped = imports_of_torch(job)
    assert stopped
    for process in stopped:
        process.suspend()  # until Slurm's SIGCONT, which is sent with its signal
    hosts = cluster.job(job)["NodeList"]
    cluster.submit(
        *("--partition=high", "--exclusive", "--nodes=2", f"--nodelist={hosts}"),
        *("--output=/dev/null", "--wrap=sleep 2"),
    )
    wait_until(lambda: cluster.job(job)["Restarts"] == "1", 90, "requeue", project.said, every=0.1)
    run.end_pause()
    assert project.end(command) == 0, project.said()
    said = (run.paths.logs / "preflight.log").read_text()
    assert "cannot import torch" not in said
    assert not run.paths.bad_nodes.exists()
    uninterrupted.equals(run)
