"""Ctrl-C and kill -9 at night: the same command goes on, to weights equal to the last bit.

One run of two ranks lives through all of it: each test takes it as the one before left it, and the last
one compares it with a run that nobody disturbed.
"""

import os
import signal
import subprocess
import sys

import pytest
from support.clone import DEADLINE_SEC, kill_tree, make_project, wait

from forge.core import json_lines
from forge.hosts.lock import WORKFLOW_LOCK, lock

pytestmark = pytest.mark.default

# Enough steps that each of the four commands still has some when it is stopped.
LONG = {"max_steps": 50, "checkpoint_every": 5, "eval_every": 25}


@pytest.fixture(scope="module")
def killed(shared_project):
    shared_project.write_config(train=LONG)
    return shared_project


def started(project):
    """The same command again, in the middle of its training."""
    process = project.start("train")
    project.wait_for_step(project.steps() + 3, process)
    return process


def newest(project):
    return project.path("checkpoints/latest").resolve().name


def test_kill_9_of_everything(killed):
    process = started(killed)
    wait(killed.path("checkpoints/latest").exists, 60)
    kill_tree(process.pid)
    process.communicate()
    assert not killed.path("trained.json").exists()


def test_same_command_resumes_and_kill_9_of_snakemake_alone_stops_its_ranks(killed):
    process = started(killed)
    os.kill(process.pid, signal.SIGKILL)
    output, _ = process.communicate()
    assert "resume from" in output
    wait(lambda: not killed.processes(), 60)
    assert newest(killed) == f"step-{killed.steps():08d}"
    assert not killed.path("trained.json").exists()


def test_ctrl_c_commits(killed):
    process = started(killed)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does: everyone in the group
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75
    assert not [word for word in ("Error", "Exception", "Traceback") if word in output], output
    assert "Ctrl-C" in output and "rerun the same command" in output
    last = output.splitlines()[-1]
    assert last.startswith("base  stopped at step ") and "rerun the command to resume" in last
    assert not killed.processes()
    assert newest(killed) == f"step-{killed.steps():08d}"


def test_same_command_given_twice_is_refused_or_waits_and_the_first_is_not_disturbed(killed):
    before = launches(killed)
    first = killed.start("train")
    wait(lambda: launches(killed) > before or first.poll() is not None)
    code, output = killed.snakemake("train")
    assert code != 0
    assert f"is being written by `snakemake` (pid {first.pid}" in output
    assert 'File "' not in output  # lines of a traceback

    killed.machine(slurm={"when_running": "wait"})
    code, output = killed.snakemake("train")
    assert code == 0, output
    assert "waiting: " in output
    assert first.communicate(timeout=60) and first.returncode == 0
    assert "Nothing to be done" in output


def test_command_that_has_waited_is_given_again_where_it_was_given(project):
    """With --directory it has left that directory, to which its own words are relative."""
    project.machine(slurm={"when_running": "wait"})
    name, said = project.root.name, project.root / "said"
    words = ["--profile", str(project.root / "profiles/local"), "--until", "tokenize"]
    words += ["--snakefile", f"{name}/workflow/Snakefile", "--directory", name]
    with (
        open(said, "w") as file,
        lock(project.root / "results/base", "snakemake", name=WORKFLOW_LOCK),
    ):
        process = subprocess.Popen(
            [sys.executable, "-m", "snakemake", *words],
            cwd=project.root.parent,
            env=project.environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        wait(lambda: "waiting: " in said.read_text() or process.poll() is not None)
    assert process.wait(DEADLINE_SEC) == 0, said.read_text()
    assert f"stop it with: kill {os.getpid()}" in said.read_text()
    assert list((project.root / "data/tokens").glob("*/manifest.json"))


def launches(project):
    lines = json_lines.read(project.path("events.jsonl"))
    return [line["launch"] for line in lines if line["event"] == "launch"]


def test_killed_run_and_one_that_nobody_disturbed_give_the_same_digests(killed, tmp_path):
    uninterrupted = make_project(tmp_path)
    uninterrupted.write_config(train=LONG)
    code, output = uninterrupted.snakemake("--until", "tokenize")
    assert code == 0, output
    by_hand = ["--run=base", "--machine=profiles/local/machine.yaml", "--ranks-per-node=2"]
    done = uninterrupted.forge("train", "config/config.yaml", *by_hand)
    assert done.returncode == 0, done.stderr
    both = (killed, uninterrupted)
    first, second = (made.read("trained.json")["weights_digest"] for made in both)
    assert first == second
    assert killed.read("validation.json")["status"] == "valid"
    for name in ("data/tokenizers", "data/tokens"):
        first, second = (files(made.root, name) for made in both)
        assert first == second
        assert any(file.endswith("manifest.json") for file in first)


def files(root, folder):
    """The content of each file of a directory."""
    found = (file for file in sorted((root / folder).rglob("*")) if file.is_file())
    return {str(file.relative_to(root)): file.read_bytes() for file in found}
