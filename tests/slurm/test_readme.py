"""The README's commands for a cluster, word for word, and those of docs/new-cluster.md. A job of the
README's stayed PENDING (PartitionTimeLimit) for ever."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.clone import link_environment
from support.pages import blocks, commands_of
from support.repository import REPOSITORY

from forge.core.files import read_json
from tools.slurm_cluster.cluster import Cluster
from tools.slurm_cluster.machines import wait_until

from .job_run import TINY_CONFIG, Progress

pytestmark = pytest.mark.tools

README, NEW_CLUSTER = "README.md", "docs/new-cluster.md"
PROFILE = "forge profile mine"


def recipe(page: str) -> list[str]:
    """The commands of a page, without its comments."""
    return [one.bare for one in commands_of("tests/slurm/test_readme.py") if one.page == page]


@pytest.fixture
def copy(shared_folder: Path, tiny_config: Path) -> Path:
    """The project as a user has it, but for the config: a smaller model on a smaller text."""
    folder = shared_folder / "project"
    for part in ("workflow", "profiles", "config"):
        shutil.copytree(REPOSITORY / part, folder / part)
    link_environment(folder)
    inputs = yaml.safe_load(tiny_config.read_text())["tokenize"]
    values: dict[str, Any] = {**TINY_CONFIG, "tokenize": inputs}
    values["train"] = {**TINY_CONFIG["train"], "max_steps": 20, "eval_every": 10}
    (folder / "config/config.yaml").write_text(yaml.safe_dump(values))
    return folder


def run(cluster: Cluster, commands: list[str], folder: Path) -> str:
    """What the commands print, each behind its own words, on the login node. Each must exit with 0."""
    output = folder / "recipe.out"
    script = "set -e\n" + "\n".join(f"cat <<'_'\n$ {text}\n_\n{text}" for text in commands)
    shell = cluster.popen("bash", "-c", f"({script}\n) > {output} 2>&1", cwd=folder)
    wait_until(
        lambda: shell.poll() is not None,
        500,
        "the end of the recipe",
        lambda: f"{output.read_text()[-3000:]}\n{cluster.squeue()}",
        every=0.2,
    )
    said = output.read_text()
    assert shell.returncode == 0, said
    return said


def of_command(said: str, beginning: str) -> str:
    """What the one command that begins so has printed."""
    [found] = [part for part in f"\n{said}".split("\n$ ") if part.startswith(beginning)]
    return found.partition("\n")[2]


def shape(line: str) -> str:
    """A line without its numbers and the builds of packages."""
    return re.sub(r"\d+(\.\d+)*(\+\w+)?", "0", line)


@pytest.mark.weekly
def test_commands_of_the_readme_train_as_they_are_written(
    exclusive_cluster: Cluster, copy: Path
) -> None:
    commands = recipe(README)
    words = [command.split()[0] for command in commands]
    assert words == ["forge", "snakemake", "snakemake", "forge", "forge", "forge"]
    said = run(exclusive_cluster, commands, copy)
    of_run = Progress(copy / "results/base")
    # Tokens and the allocation of the target preflight; then the allocation again, and validation.
    assert said.count("submitted with SLURM jobid") == 4, said
    assert read_json(of_run.paths.validated)["status"] == "valid"
    assert "nothing to be done" in of_command(said, "forge submit")
    nodes = re.findall(r"NODE (\S+) OK", (of_run.paths.logs / "preflight.log").read_text())
    assert len(nodes) == 2 and len(of_run.events("launch")) == 1
    check_new_cluster(exclusive_cluster, copy, said)


def check_new_cluster(cluster: Cluster, folder: Path, before: str) -> None:
    """The commands of docs/new-cluster.md that are not the README's, with its profile and its finished
    run. before: what the README's have printed."""
    said = run(cluster, recipe(NEW_CLUSTER), folder)
    print(said)
    assert of_command(said, "srun -N2 --ntasks-per-node=1 ls").count("/workflow") == 2
    versions = of_command(said, "srun -N2 --ntasks-per-node=1 .venv/bin/python").split()[1::2]
    assert len(versions) == 2 and len(set(versions)) == 1
    assert "UP" in of_command(said, "srun -N1 ip")
    assert of_command(said, "srun -N1 which").count("/") >= 2
    samples = [block for block in blocks() if (block.page, block.kind) == (NEW_CLUSTER, "text")]
    for sample, command in zip(samples, (PROFILE, "cat "), strict=True):
        printed = {shape(line) for line in of_command(before + said, command).splitlines()}
        assert {shape(line) for line in sample.text.splitlines()} <= printed
