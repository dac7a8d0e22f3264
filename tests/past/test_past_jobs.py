"""A job that waits in the queue when Forge is updated reads what was written when it was submitted."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from support.clone import Project

from forge.core import provenance
from forge.core.records import RunSettings
from forge.flow import runs
from forge.slurm.sbatch import Request


def jobs(output: str) -> list[str]:
    """The rules that a dry run would run, without the target."""
    table = output.partition("Job stats:")[2]
    found = re.findall(r"^(\w+) +\d+$", table, re.MULTILINE)
    return sorted(set(found) - {"total", "train", "resume"})


def test_the_plan_of_a_queued_run_is_what_waits_in_the_queue(project_of):
    code, output = project_of("queued").snakemake("-n", "train", profile="profiles/slurm-cpu")
    assert code == 0, output
    allocation = ["preflight_run", "stage_run", "train_run"]
    assert jobs(output) == sorted([*allocation, "report_run", "validate_run"]), output
    assert "refused" not in output


def test_a_queued_job_plans_what_it_was_submitted_for_whatever_the_config_says_now(project_of):
    project = project_of("queued")
    (project.root / "config/config.yaml").write_text("an edit: of the day after\n")
    [submitted] = (project.root / ".snakemake/forge").glob("submitted-*.json")
    done = subprocess.run(
        [*command_of_job(project), "-n"],
        cwd=project.root,
        env={
            **project.environment,
            **{"FORGE_SUBMITTED": str(submitted.relative_to(project.root))},
            **{"FORGE_RULES_IN_BATCH_STEP": "1", "SLURM_JOB_ID": "3"},
        },
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert jobs(output) == ["preflight_run", "stage_run", "train_run"], output


def command_of_job(project: Project) -> list[str]:
    """Snakemake as the job's script starts it, in this project, which has another path now."""
    line = (project.root / "job.sh").read_text().splitlines()[-1]
    words = shlex.split(line.partition(" && ")[2])
    there = str(Path(words[words.index("--snakefile") + 1]).parents[1])
    # A file of the Snakemake that submitted the job, by which that one knows it has begun.
    words = [word for word in words if "/.snakemake/tmp." not in word]
    return [sys.executable, *(word.replace(there, str(project.root)) for word in words[1:])]


def test_a_queued_job_finds_its_runs_and_its_settings(project_of, past, monkeypatch):
    project, recorded = project_of("queued"), past.recorded["queued"]
    [submitted] = (project.root / ".snakemake/forge").glob("submitted-*.json")
    monkeypatch.setenv(runs.SUBMITTED, str(submitted))
    found = runs.read_runs(None, main=False)
    assert {name: config.ids.tokens for name, config in found.items()} == {
        "queued": recorded["ids"]["tokens"]
    }
    assert provenance.config_digest(found["queued"]) == recorded["config_digest"]
    settings = RunSettings.read(project.root / ".snakemake/forge/queued.settings.json")
    assert settings.sections["evaluate"]["tasks"] == []
    assert Request.from_json(settings.jobs["evaluate_run"]).partition == "main"
