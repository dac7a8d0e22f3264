"""Ctrl-C and kill -9 at night: the same command goes on, to weights equal to the last bit."""

import os
import signal

import pytest
from conftest import kill_tree, wait

pytestmark = pytest.mark.xdist_group("kills")


def finish(project, uninterrupted):
    code, output = project.snakemake("train")
    assert code == 0, output
    assert (
        project.read("trained.json")["weights_digest"]
        == uninterrupted.read("trained.json")["weights_digest"]
    )
    assert project.read("validation.json")["status"] == "valid"
    return output


@pytest.fixture
def long_project(project):
    # The weights are compared with those of the uninterrupted run, so validation need not compute.
    project.write_config(train={"max_steps": 40}, validate={"depth": "digests"})
    return project


def test_kill_9_of_everything_then_the_same_command_ends_identical(long_project, uninterrupted):
    process = long_project.start("train")
    long_project.wait_for_step(6, process)
    wait(long_project.path("checkpoints/latest").exists, 60)
    kill_tree(process.pid)
    process.communicate()
    assert not long_project.path("trained.json").exists()
    output = finish(long_project, uninterrupted)
    assert "resume from" in output


def test_kill_9_of_snakemake_alone_stops_its_ranks_and_the_next_resumes(
    long_project, uninterrupted
):
    process = long_project.start("train")
    long_project.wait_for_step(6, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    wait(lambda: not long_project.processes(), 60)
    stopped = long_project.steps()
    assert long_project.path("checkpoints/latest").resolve().name == f"step-{stopped:08d}"
    finish(long_project, uninterrupted)


def test_ctrl_c_commits_and_the_same_command_resumes(long_project, uninterrupted):
    process = long_project.start("train")
    long_project.wait_for_step(6, process)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does: everyone in the group
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "Ctrl-C" in output and "rerun the same command" in output
    last = output.splitlines()[-1]
    assert last.startswith("base  stopped at step ") and "rerun the command to resume" in last
    assert not long_project.processes()
    finish(long_project, uninterrupted)


def test_same_command_given_twice_is_refused_and_the_first_is_not_disturbed(
    long_project, uninterrupted
):
    process = long_project.start("train")
    long_project.wait_for_step(6, process)
    code, output = long_project.snakemake("train")
    assert code != 0
    assert f"is being written by `snakemake` (pid {process.pid}" in output
    process.communicate(timeout=120)
    assert process.returncode == 0
    finish(long_project, uninterrupted)


def test_the_same_command_can_wait_for_the_first(long_project, uninterrupted):
    long_project.machine(slurm={"when_running": "wait"})
    first = long_project.start("train")
    long_project.wait_for_step(6, first)
    code, output = long_project.snakemake("train")
    assert code == 0, output
    assert "waiting: " in output
    assert first.communicate(timeout=60) and first.returncode == 0
    assert "Nothing to be done" in output
    finish(long_project, uninterrupted)


def test_two_complete_runs_from_scratch_give_the_same_digests(long_project, uninterrupted):
    finish(long_project, uninterrupted)
    for name in ("data/tokenizers", "data/tokens"):
        first, second = (
            {
                str(file.relative_to(made.root)): file.read_bytes()
                for file in sorted((made.root / name).rglob("*"))
                if file.is_file()
            }
            for made in (uninterrupted, long_project)
        )
        assert first == second
        assert any(file.endswith("manifest.json") for file in first)
