"""The workflow draws itself with every profile, its lint is clean, and the drawn pictures are true."""

import re
import shutil
import subprocess
import sys

import pytest
from conftest import REPOSITORY

PROFILES = sorted(path.parent.name for path in (REPOSITORY / "profiles").glob("*/config.yaml"))


def snakemake(*arguments, cwd=REPOSITORY):
    return subprocess.run(
        [sys.executable, "-m", "snakemake", *arguments],
        cwd=cwd,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("profile", PROFILES)
def test_dag_is_drawn_with_every_profile(profile):
    done = snakemake("--profile", f"profiles/{profile}", "--forceall", "--dag", "dot", "train")
    assert done.returncode == 0, done.stderr
    for rule in (
        "tokenizer",
        "tokenize",
        "stage_run",
        "preflight_run",
        "train_run",
        "validate_run",
    ):
        assert rule in done.stdout


def test_lint_is_clean():
    done = snakemake("--lint")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Congratulations" in done.stdout + done.stderr


def edges(dot):
    """Pairs of rule names; their order in the text changes from call to call."""
    names = dict(re.findall(r'(\d+)\[label = "(\w+)', dot))
    return {(names[a], names[b]) for a, b in re.findall(r"(\d+) -> (\d+)", dot)}


def test_rule_graph_in_the_documents_is_todays():
    done = snakemake("--profile", "profiles/local", "--forceall", "--rulegraph", "dot", "train")
    drawn = edges((REPOSITORY / "docs/rulegraph.dot").read_text())
    assert ("tokenizer", "tokenize") in drawn
    assert edges(done.stdout) == drawn, "run: make dag"


def test_train_is_what_no_target_means():
    done = snakemake("--profile", "profiles/local", "-n", "--forceall")
    assert done.returncode == 0, done.stderr
    assert "rule train:" in done.stdout + done.stderr


def test_example_of_the_workflow_catalog_is_planned_without_a_profile(tmp_path):
    for part in (".test", "workflow", "profiles"):
        shutil.copytree(
            REPOSITORY / part, tmp_path / part, ignore=shutil.ignore_patterns("results")
        )
    shutil.copy(REPOSITORY / "LICENSE", tmp_path)
    done = snakemake("--directory", ".test", "--cores", "2", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rule report_run:" in done.stdout + done.stderr
