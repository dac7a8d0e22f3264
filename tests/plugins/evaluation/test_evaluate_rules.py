"""Threat: an evaluation that is not made again after its tasks have changed, or is for another reason."""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from forge.core.config import Config, checked, load_config
from forge.core.errors import ConfigError
from forge.core.hooks import check_run, check_targets
from forge.core.paths import RunPaths, settings_file
from forge.core.records import RunSettings
from forge.data.content_ids import resolve
from forge.flow import rule_inputs, workflow_command
from forge.plugins.evaluation import tasks
from forge.plugins.evaluation.hooks import wanted_files
from forge.plugins.evaluation.settings import Evaluate
from forge.slurm.sbatch import Request


@pytest.fixture(autouse=True)
def _project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("some text")


def run_of(**evaluate):
    values = {"tokenize": {"inputs": ["text.txt"]}, "train": {"keep_every": 5}}
    section = {"evaluate": evaluate} if evaluate else {}
    return resolve(checked(Config, {**values, **section}, "the test"))


def settings(config, rule):
    found = rule_inputs.rule_settings({"base": config}, main=True)
    return Path(found[rule]["base"])


def test_settings_of_evaluate_run_change_with_the_section_and_nothing_else_does():
    plain, scored = run_of(), run_of(tasks=["words"])
    assert settings(plain, "evaluate_run") != settings(scored, "evaluate_run")
    for rule in ("config_run", "validate_run"):
        assert settings(plain, rule) == settings(scored, rule)
    sections = RunSettings.read(settings(scored, "evaluate_run")).sections
    assert sections.keys() == {"evaluate"}
    config = load_config(str(settings(scored, "config_run")), sections)
    assert config.of(Evaluate) == scored.of(Evaluate)


def test_only_settings_that_scores_and_data_were_not_made_with_are_newer():
    run = run_of(tasks=["words"])
    paths = RunPaths.of(run)
    for named, is_due in ((["words"], False), (["other"], True)):
        for path, values in (
            (paths.evaluation_data, {}),
            (paths.evaluation, {"evaluate": run_of(tasks=named).to_json()["evaluate"]}),
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(values))
            os.utime(path, (time.time() - 3600,) * 2)
        made = {"evaluate_run": paths.evaluation, "evaluate_data": paths.evaluation_data}
        for rule, path in made.items():
            assert (settings(run, rule).stat().st_mtime_ns > path.stat().st_mtime_ns) == is_due


def test_data_is_downloaded_again_for_other_tasks_only_and_once():
    run, paths = run_of(tasks=["words"], limit=5), RunPaths.of(run_of())
    paths.evaluation_data.parent.mkdir(parents=True)
    for path, values in (
        (paths.evaluation, {"evaluate": run_of(tasks=["words"]).to_json()["evaluate"]}),
        (paths.evaluation_data, {"tasks": ["words"], "include_path": None}),
    ):
        path.write_text(json.dumps(values))
        os.utime(path, (time.time() - 3600,) * 2)
    scored, got = (path.stat().st_mtime_ns for path in (paths.evaluation, paths.evaluation_data))
    assert settings(run, "evaluate_run").stat().st_mtime_ns > scored
    assert settings(run, "evaluate_data").stat().st_mtime_ns <= got
    other = run_of(tasks=["other"])
    assert settings(other, "evaluate_data").stat().st_mtime_ns > got
    paths.evaluation_data.write_text(json.dumps({"tasks": ["other"], "include_path": None}))
    os.utime(paths.evaluation_data, (time.time() + 60,) * 2)  # the scores are of before
    got = paths.evaluation_data.stat().st_mtime_ns
    assert settings(other, "evaluate_data").stat().st_mtime_ns <= got


def kept(run, **of_profile):
    """The options of sbatch that are kept for jobs during training."""
    given = SimpleNamespace(  # Snakemake's ResourceSettings
        default_resources={
            **{"slurm_account": "lab", "slurm_partition": "cpu", "mem_mb": 4000, "runtime": 60}
        },
        overwrite_resources={"evaluate_run": of_profile},
        overwrite_threads={"evaluate_run": SimpleNamespace(raw="8")},  # a Resource of Snakemake
    )
    workflow_command.keep_settings({run.run: run}, given, lambda name: 5000, submits=True)
    found = RunSettings.read(settings_file(run.run))
    assert found.of(Evaluate) == run.of(Evaluate)
    return list(Request.from_json(found.jobs["evaluate_run"]).options)


def test_jobs_during_training_ask_for_what_the_profile_gives_evaluate_run():
    run = run_of(tasks=["words"])
    gpu = {"slurm_partition": "gpu", "gres": "gpu:1", "mem_mb": "90000", "runtime": 120}
    assert kept(run, **gpu) == [
        *("-A", "lab", "-p", "gpu", "-t", "120", "--mem", "90000"),
        *("--cpus-per-task=8", "--gres=gpu:1"),
    ]
    of_the_model = " ".join(kept(run))
    assert "-p cpu " in of_the_model and "--mem 5000 " in of_the_model


def test_targets_ask_for_files_of_runs_with_tasks_alone():
    runs = (run_of(), run_of(tasks=["words"]), run_of(tasks=["words"], every=10))
    assert [wanted_files(run, "resume") for run in runs] == [wanted_files(r, "train") for r in runs]
    asked = [(wanted_files(run, "train"), wanted_files(run, "compare")) for run in runs]
    assert asked == [
        ([], []),
        ([], ["evaluation.json"]),
        (["evaluations/data.json"], ["evaluation.json"]),
    ]


def test_directory_of_tasks_that_is_not_there_is_refused_before_the_run_is_planned(monkeypatch):
    """Snakemake shows what its input functions raise with a traceback."""
    monkeypatch.setattr(tasks, "PACKAGE", "json")  # as if the harness were installed
    config = checked(Config, {"evaluate": {"tasks": ["mine"], "include_path": "taks"}}, "the test")
    with pytest.raises(ConfigError, match="include_path is 'taks', and there is no such directory"):
        check_run(config, "run base")
    Path("taks").mkdir()
    check_run(config, "run base")


def test_target_without_tasks_is_refused_with_what_to_set():
    with pytest.raises(ConfigError, match=r"nothing to evaluate: evaluate.tasks is \[\] for base"):
        check_targets({"base": run_of()}, ["evaluate"])
    check_targets({"base": run_of()}, ["train"])
    check_targets({"base": run_of(tasks=["words"])}, ["evaluate"])
