"""Threat: the command on the login node waits for ever, or minutes too long, for a job that has ended."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from contextlib import contextmanager

import pytest

from forge.core.files import read_json
from forge.slurm import job_watch
from tools.slurm_cluster.cluster import Cluster
from tools.slurm_cluster.machines import wait_until

from .job_run import PAUSES, Uninterrupted, batch_steps_of, paused
from .project import Project

NewProject = Callable[..., Project]
# One pause between two questions, and time for a busy machine to answer, to ask sacct and to leave.
SOON_SEC = job_watch.POLL_SEC + 15
HELD = {"slurm": {"options": "--hold"}}


def wait_for_words(project: Project, words: str, timeout: float) -> None:
    wait_until(lambda: words in project.output(), timeout, words, project.said, every=0.1)


@contextmanager
def both_daemons_away(cluster: Cluster):
    """slurmctld and slurmdbd do not run inside of this, as while a head node boots."""
    for name in ("slurmctld", "slurmdbd"):
        cluster.stop_daemon(name)
    yield
    for name in ("slurmdbd", "slurmctld"):
        cluster.start_daemon(name)


def test_held_job_is_named_and_its_cancellation_ends_the_command_soon(
    new_project: NewProject, cluster: Cluster
) -> None:
    project = new_project(machine=HELD)
    command = project.start("preflight")
    job = project.wait_for_job()
    wait_for_words(project, "JobHeldUser", SOON_SEC)
    assert f"scontrol release {job}" in project.output()
    told = cluster.run("forge", "status", "results/base", cwd=project.folder).stdout
    assert "JobHeldUser" in told and f"scontrol release {job}" in told
    cluster.run("scancel", job)
    wait_for_words(project, f"job {job} (run base) was cancelled by user root", SOON_SEC)
    assert project.end(command, timeout=SOON_SEC) != 0
    assert "Error in" not in project.output() and "Logfile" not in project.output()


def test_job_on_nodes_that_do_not_see_the_project_is_reported_as_such(
    new_project: NewProject, exclusive_cluster: Cluster
) -> None:
    project = new_project()
    for node in set(exclusive_cluster.nodes) - set(project.excluded()):
        exclusive_cluster.hide(node, project.folder)
    assert project.end(project.start("preflight"), timeout=120) != 0
    [job] = project.submitted()
    words = rf"job {job} \(run base\) failed on (node\d+) before .*: does it see (\S+)\?"
    found = re.search(words, project.output())
    assert found and found[2] == str(project.folder), project.said()
    assert found[1] not in project.excluded()
    assert "Error in" not in project.output()


@pytest.mark.weekly
def test_daemons_that_are_away_are_waited_for_in_the_queue_in_training_and_at_its_end(
    new_project: NewProject, exclusive_cluster: Cluster, uninterrupted: Uninterrupted
) -> None:
    in_training, before_its_end, _ = PAUSES
    project = new_project(on=1, machine=HELD)
    command = project.start(env=paused(in_training, before_its_end))
    job = project.wait_for_job()
    with both_daemons_away(exclusive_cluster):
        time.sleep(30)  # the case itself: that long they are away
    wait_for_words(project, "Slurm answers again", SOON_SEC)
    # Until slurmctld has numbered the job in the database it refuses each change: "try again in a bit".
    release = ("scontrol", "release", job)
    wait_until(
        lambda: exclusive_cluster.run(*release, check=False).returncode == 0,
        SOON_SEC,
        "the release of the job",
        project.said,
    )
    project.run().wait_for_pause(in_training)
    with both_daemons_away(exclusive_cluster):
        silent = "Jobs continue; this command tries again"
        wait_until(lambda: project.output().count(silent) == 2, SOON_SEC, silent, project.said)
    project.run().end_pause(in_training)
    project.run().wait_for_pause(before_its_end)
    exclusive_cluster.stop_daemon("slurmdbd")
    project.run().end_pause(before_its_end)
    # The next job follows, or waits: its account is in the database.
    follows = re.compile(rf"(?s)jobid {job}\b.*(jobid |when Slurm takes new jobs)")
    wait_until(lambda: follows.search(project.output()), 90, "the next job", project.said)
    exclusive_cluster.start_daemon("slurmdbd")
    assert project.end(command) == 0, project.said()
    assert project.submitted()[0] == job and len(project.submitted()) == 2
    uninterrupted.equals(project.run())


@pytest.mark.weekly
def test_job_that_has_trained_when_its_time_is_up_is_no_failure(
    new_project: NewProject, cluster: Cluster
) -> None:
    """It exits with 0 in the seconds that Slurm leaves it, and Slurm calls it TIMEOUT: the completion
    record was removed, and a longer time limit asked for."""
    project = new_project(on=1)
    command = project.start(env=paused())
    job = project.wait_for_job()
    project.run().wait_for_pause()
    [in_job] = batch_steps_of(job)
    in_job.suspend()  # Slurm continues it when it tells it to end
    project.run().end_pause()
    wait_until(project.run().paths.trained.is_file, 90, "the completion record", project.said)
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=1")
    cluster.wait_for_state(job, "TIMEOUT", timeout=150)
    assert project.end(command) == 0, project.said()
    assert project.submitted()[0] == job and len(project.submitted()) == 2
    assert "raise runtime" not in project.output()
    assert read_json(project.run().paths.validated)["status"] == "valid"


@pytest.mark.weekly
def test_job_that_slurm_has_forgotten_is_judged_by_its_completion_record(
    new_project: NewProject, exclusive_cluster: Cluster
) -> None:
    exclusive_cluster.configure(MinJobAge=2)
    project = new_project(on=1)
    command = project.start(env=paused())
    job = project.wait_for_job()
    project.run().wait_for_pause()
    command.send_signal(signal.SIGSTOP)  # it does not see the end
    project.run().end_pause()
    exclusive_cluster.wait_for_state(job, "COMPLETED")
    with both_daemons_away(exclusive_cluster):
        command.send_signal(signal.SIGCONT)
        wait_for_words(project, "Slurm does not answer", SOON_SEC)
        command.send_signal(signal.SIGSTOP)  # nor what Slurm knows until it has forgotten the job
    show = ("scontrol", "show", "job", job)
    wait_until(
        lambda: exclusive_cluster.run(*show, check=False).returncode, 60, "forgotten", every=0.5
    )
    command.send_signal(signal.SIGCONT)
    assert project.end(command) == 0, project.said()
    assert read_json(project.run().paths.validated)["status"] == "valid"
