"""The README's commands for a cluster, word for word. A job of theirs stayed PENDING (PartitionTimeLimit)
for ever."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from forge.core.files import read_json
from tools.slurm_cluster.cluster import REPOSITORY, Cluster
from tools.slurm_cluster.machines import wait_until

from .job_run import TINY_CONFIG, Progress


def recipe() -> list[str]:
    """The commands of the README's section on a cluster, without its comments."""
    text = (REPOSITORY / "README.md").read_text()
    section = text.split("\n## Your cluster, in four commands\n")[1].split("\n## ")[0]
    return [line.partition("  #")[0] for line in re.findall(r"^ {4}(\S.*)$", section, re.MULTILINE)]


@pytest.fixture
def copy(shared_folder: Path, tiny_config: Path) -> Path:
    """The project as a user has it, but for the config: a smaller model on a smaller text."""
    folder = shared_folder / "project"
    for part in ("workflow", "profiles", "config"):
        shutil.copytree(REPOSITORY / part, folder / part)
    inputs = yaml.safe_load(tiny_config.read_text())["tokenize"]
    values: dict[str, Any] = {**TINY_CONFIG, "tokenize": inputs}
    values["train"] = {**TINY_CONFIG["train"], "max_steps": 20, "eval_every": 10}
    (folder / "config/config.yaml").write_text(yaml.safe_dump(values))
    return folder


def test_commands_of_the_readme_train_as_they_are_written(
    exclusive_cluster: Cluster, copy: Path
) -> None:
    commands = recipe()
    words = [command.split()[0] for command in commands]
    assert words == ["cp", "sed", "snakemake", "snakemake", "forge", "forge"]
    script = "set -e\n" + "\n".join(commands)
    output = copy / "recipe.out"
    shell = exclusive_cluster.popen("bash", "-c", f"({script}) > {output} 2>&1", cwd=copy)
    run = Progress(copy / "results/base")
    wait_until(
        lambda: shell.poll() is not None,
        500,
        "the end of the recipe",
        lambda: f"{output.read_text()[-3000:]}\n{exclusive_cluster.squeue()}",
        every=0.2,
    )
    said = output.read_text()
    assert shell.returncode == 0, said
    # Tokens and the allocation of the target preflight; then the allocation again, and validation.
    assert said.count("submitted with SLURM jobid") == 4, said
    assert read_json(run.paths.validated)["status"] == "valid"
    nodes = re.findall(r"NODE (\S+) OK", (run.paths.logs / "preflight.log").read_text())
    assert len(nodes) == 2 and len(run.events("launch")) == 1
