"""The workflow draws itself with every profile, its lint is clean, and the drawn pictures are true."""

import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise

import pytest
import yaml
from support.clone import REPOSITORY
from support.pages import blocks

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


def picture_of_the_readme():
    """The arrows between rules. Text and checkpoint, at its ends, are in brackets."""
    [picture] = [
        block for block in blocks() if (block.page, block.kind) == ("README.md", "mermaid")
    ]
    text = re.sub(r"\w+\(\[.*?\]\)", "END", picture.text)
    chains = [re.findall(r"\w+", line) for line in text.splitlines() if "-->" in line]
    arrows = {arrow for chain in chains for arrow in pairwise(chain)}
    return {arrow for arrow in arrows if "END" not in arrow}


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_draws_the_picture_of_the_readme_where_no_target_is_named(profile):
    done = snakemake("--profile", f"profiles/{profile}", "--forceall", "--dag", "dot")
    assert done.returncode == 0, done.stderr
    drawn, shown = edges(done.stdout), picture_of_the_readme()
    assert shown <= drawn
    # Left out there: who reads each run's config, and what follows from the rest.
    rules, rules_shown = ({rule for arrow in arrows for rule in arrow} for arrows in (drawn, shown))
    assert rules - rules_shown == {"config_run", "train"}


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


@pytest.mark.parametrize("command", ["--lint", "--rulegraph", "--dry-run"])
def test_bare_clone_without_forge_says_in_one_sentence_what_to_run(command):
    """Snakemake is installed, Forge is not, by which alone the rules of a config are known."""
    without = "import sys; sys.modules['forge'] = None; from snakemake.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", without, command],
        cwd=REPOSITORY,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 1 and "Traceback" not in output
    [sentence] = [line for line in output.splitlines() if "Forge is not installed" in line]
    assert "run `make setup` and then .venv/bin/snakemake" in sentence


def test_page_of_the_workflow_catalog_prints_no_command_that_does_not_work():
    """It prints `snakemake --cores all --sdm KIND` for each kind of deployment that is true: none does
    anything here. By the two files below it knows a workflow of standard usage."""
    usage = yaml.safe_load((REPOSITORY / ".snakemake-workflow-catalog.yml").read_text())["usage"]
    assert not any(usage["software-stack-deployment"].values())
    assert usage["report"] and "flags" not in usage["mandatory-flags"]
    assert (REPOSITORY / "config/README.md").is_file()
    assert (REPOSITORY / "workflow/Snakefile").is_file()


@pytest.mark.parametrize("size", ["124m", "70b"])
def test_size_to_start_from_is_planned_by_the_command_in_its_first_lines(size):
    lines = (REPOSITORY / f"config/sizes/{size}.yaml").read_text().splitlines()
    [command] = [line.split() for line in lines if line.startswith("#   snakemake")]
    done = snakemake(*command[2:], "--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"results/{size}/trained.json" in done.stdout + done.stderr
