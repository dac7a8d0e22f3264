"""The workflow draws itself with every profile, its lint is clean, and the drawn pictures are true."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from support.clone import REPOSITORY

PROFILES = sorted(path.parent.name for path in (REPOSITORY / "profiles").glob("*/config.yaml"))


def snakemake(*arguments, cwd=REPOSITORY, **env):
    return subprocess.run(
        [sys.executable, "-m", "snakemake", *arguments],
        cwd=cwd,
        env=os.environ | env,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


def edges(dot):
    """Pairs of rule names; their order in the text changes from call to call."""
    names = dict(re.findall(r'(\d+)\[label = "(\w+)', dot))
    return {(names[a], names[b]) for a, b in re.findall(r"(\d+) -> (\d+)", dot)}


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_draws_the_rule_graph_of_the_documents_where_no_target_is_named(profile):
    done = snakemake("--profile", f"profiles/{profile}", "--forceall", "--dag", "dot")
    assert done.returncode == 0, done.stderr
    drawn = edges((REPOSITORY / "docs/rulegraph.dot").read_text())
    assert {("tokenizer", "tokenize"), ("report_run", "train")} <= drawn
    assert edges(done.stdout) == drawn, "run: make dag"


def test_make_dag_would_draw_the_committed_picture_again():
    """Its colours too: they follow from the number of rules."""
    words = ("--profile", "profiles/local", "--forceall", "--rulegraph", "dot", "train")
    drawn = snakemake(*words, PYTHONHASHSEED="0").stdout
    assert drawn == (REPOSITORY / "docs/rulegraph.dot").read_text(), "run: make dag"


def test_dry_run_ends_with_the_lines_to_edit():
    done = snakemake("--profile", "profiles/slurm-cpu", "-n")
    assert done.returncode == 0, done.stderr
    said, fix = (done.stdout + done.stderr).splitlines()[-2:]
    assert said.startswith("without -n this is refused: the profile still says")
    assert {"EDIT_account", "EDIT_partition"} <= set(said.split())
    assert "profiles/slurm-cpu/config.yaml" in fix


def test_lint_is_clean():
    done = snakemake("--lint")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Congratulations" in done.stdout + done.stderr


def test_example_of_the_workflow_catalog_is_planned_without_a_profile(tmp_path):
    for part in (".test", "workflow", "profiles"):
        shutil.copytree(
            REPOSITORY / part, tmp_path / part, ignore=shutil.ignore_patterns("results")
        )
    shutil.copy(REPOSITORY / "LICENSE", tmp_path)
    done = snakemake("--directory", ".test", "--cores", "2", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rule report_run:" in done.stdout + done.stderr
