"""Threat: a checkpoint with two jobs or with none, and a queue that disturbs training."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from forge import cli
from forge.checkpoint.manifest import MANIFEST
from forge.core.config import Config, apply_overrides, checked
from forge.core.files import write_json
from forge.core.paths import RunPaths, checkpoint_name
from forge.core.records import RunSettings
from forge.plugins.evaluation import jobs
from forge.plugins.evaluation.jobs import EvaluationJobs, checkpoint_jobs
from forge.plugins.evaluation.records import SubmittedJob
from forge.plugins.evaluation.settings import Evaluate
from forge.slurm import slurm
from forge.slurm.sbatch import Request

OPTIONS = ["--partition=gpu", "--gres=gpu:1", "--time=60"]
EVERY = Evaluate(tasks=["words", "more words"], include_path="my tasks", every=10)
REQUEST = Request(
    *(("evaluate_run",), 60),
    partition="gpu",
    extra="--exclude=n9 --nice",
    options=(*OPTIONS, "--exclude=n9", "--nice"),
)
JOBS = {"evaluate_run": REQUEST.to_json()}
SETTINGS = RunSettings(evaluate=EVERY, jobs=JOBS)


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    """A run in a Slurm job, whose checkpoints at 10 and 20 are evaluated."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(jobs, "POLL_SEC", 0.01)
    return RunPaths(tmp_path / "base")


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The sbatch commands, which a stand-in for Slurm takes."""
    lines: list[list[str]] = []

    def ask(*line: str, **options: float) -> str:
        lines.append(list(line))
        return f"{100 + len(lines)};cluster\n"

    monkeypatch.setattr(slurm, "ask", ask)
    return lines


def commit(paths: RunPaths, *steps: int) -> None:
    for step in steps:
        folder = paths.checkpoints / f"step-{step:08}"
        folder.mkdir(parents=True)
        (folder / MANIFEST).touch()


def train(paths: RunPaths, *steps: int, settings: RunSettings = SETTINGS) -> None:
    """A launch that commits these checkpoints."""
    with checkpoint_jobs(paths, settings, "my data"):
        commit(paths, *steps)


def steps_of(lines: list[list[str]]) -> list[str]:
    return [word for line in lines for word in line if word.startswith("--job-name")]


def test_each_kth_checkpoint_gets_one_job_also_after_a_requeue(
    paths: RunPaths, submitted: list[list[str]]
) -> None:
    train(paths, 5, 10)
    assert steps_of(submitted) == ["--job-name=evaluate-base-step-00000010"]
    kept = SubmittedJob.read(paths.evaluations / "step-00000010.job.json")
    assert kept.job == "101"
    train(paths, 15, 20)
    assert steps_of(submitted)[1:] == ["--job-name=evaluate-base-step-00000020"]
    train(paths)
    assert len(submitted) == 2


def test_a_checkpoint_that_was_evaluated_by_hand_gets_no_job(
    paths: RunPaths, submitted: list[list[str]]
) -> None:
    paths.evaluations.mkdir(parents=True)
    paths.evaluation_of(Path(checkpoint_name(10))).touch()
    train(paths, 10)
    assert submitted == []


@pytest.mark.parametrize("job", [None, "7"])
def test_outside_of_slurm_and_without_a_profile_nothing_is_submitted(
    paths: RunPaths, submitted: list[list[str]], monkeypatch: pytest.MonkeyPatch, job: str | None
) -> None:
    if not job:
        monkeypatch.delenv("SLURM_JOB_ID")
    train(paths, 10, settings=RunSettings(evaluate=EVERY) if job else SETTINGS)
    assert submitted == []


def test_failing_sbatch_is_one_warning_and_the_next_launch_tries_again(
    paths: RunPaths,
    submitted: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    works = slurm.ask

    def fails(*line: str, **options: float) -> str:
        raise slurm.Refused("sbatch: error: Access denied")

    monkeypatch.setattr(slurm, "ask", fails)
    train(paths, 10, 20)
    said = capsys.readouterr().err
    assert said.count("warning: evaluate: no job was submitted") == 1 and "Access denied" in said
    monkeypatch.setattr(slurm, "ask", works)
    train(paths)
    assert len(submitted) == 2


def test_a_job_that_slurm_may_have_taken_is_not_submitted_again(
    paths: RunPaths, submitted: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    works = slurm.ask

    def silent(*line: str, **options: float) -> str:
        raise slurm.silent("sbatch: no answer within 20 s")

    monkeypatch.setattr(slurm, "ask", silent)
    train(paths, 10)
    monkeypatch.setattr(slurm, "ask", works)
    train(paths)
    assert submitted == []


def test_settings_beside_the_results_submit_nothing(
    paths: RunPaths, submitted: list[list[str]]
) -> None:
    """sbatch would run `--wrap` of whoever has written them."""
    planted = {"evaluate": {"tasks": ["words"], "every": 10}, "jobs": JOBS}
    write_json(paths.evaluations / "settings.json", {"format": 1, **planted})
    train(paths, 10, settings=RunSettings())
    assert submitted == []


def test_job_has_the_resources_of_the_profile_and_nothing_of_the_rule_that_trains(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORGE_IN_WORKFLOW", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "99")
    monkeypatch.setenv("FORGE_USER_OMP_NUM_THREADS", "")
    folder = paths.checkpoints / "step-00000010"
    jobs = EvaluationJobs.of(paths, SETTINGS, "my data")
    assert jobs is not None
    line = jobs.sbatch_line(folder)
    assert line[0] == "sbatch" and set(OPTIONS) < set(line)
    assert f"--chdir={Path.cwd()}" in line
    assert f"--output={paths.logs}/evaluate-step-00000010.txt" in line
    words = shlex.split(line[-1].removeprefix("--wrap=exec "))
    assert words[:4] == [
        *("env", "--unset=FORGE_IN_WORKFLOW", "--unset=FORGE_SUBMITTED", "--unset=OMP_NUM_THREADS"),
    ]
    assert words[4:9] == [sys.executable, "-m", "forge", "evaluate", str(folder)]
    options = cli._overrides(words[9:])[0]
    assert options.pop("data") == "my data"
    told = checked(Config, apply_overrides({}, options), "the job").of(Evaluate)
    assert told == EVERY.model_copy(update={"every": None})
