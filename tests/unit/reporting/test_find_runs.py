"""`forge status` said "no runs" where the config keeps them in another folder."""

import pytest
from support.recorded_run import RecordedRun

from forge import cli
from forge.core.errors import ConfigError
from forge.core.paths import WORKFLOW_RUNS
from forge.core.records import WorkflowRuns
from forge.reporting.find_runs import find_runs


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project whose runs are on another disk."""
    (tmp_path / "project/config").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "project")
    for name in ("alpha", "beta"):
        RecordedRun(tmp_path / "scratch" / name).freeze_config()
    return tmp_path


def configure(project, text):
    (project / "project/config/config.yaml").write_text(text)


def names(*asked):
    return [run.root.name for run in find_runs(list(asked))]


def test_runs_are_found_where_the_config_has_them(project, capsys):
    assert names() == []
    configure(project, f"results: {project}/scratch\ntrain: {{max_steps: 7}}\n")
    assert names() == ["alpha", "beta"]
    assert names("beta") == ["beta"]
    assert cli.main(["status"]) == 0
    assert "alpha" in capsys.readouterr().out
    with pytest.raises(ConfigError) as caught:
        find_runs(["gamma"])
    assert caught.value.fix == "there are: alpha, beta"


@pytest.mark.parametrize("text", ["results: [", "results: ''\n", "- a list\n"])
def test_config_that_is_being_edited_hides_no_run(project, capsys, text):
    RecordedRun(project / "project/results/base").freeze_config()
    configure(project, text)
    assert names() == ["base"]
    said = capsys.readouterr().err
    assert said.startswith("note: ") and "looking for runs in results/" in said


def test_without_a_config_runs_are_in_results(project):
    RecordedRun(project / "project/results/base").freeze_config()
    assert names() == names("base") == ["base"]


# --- runs of the last workflow command --------------------------------------------------------------


def write_down(*folders):
    WorkflowRuns(folders={folder.name: str(folder) for folder in folders}).write(WORKFLOW_RUNS)


def test_runs_of_the_last_command_are_found_whatever_config_it_had(project, capsys):
    RecordedRun(project / "project/results/base").freeze_config()
    write_down(project / "scratch/beta", project / "scratch/alpha", project / "scratch/planned")
    assert names() == ["alpha", "beta", "base"]  # `planned` has no config yet
    assert names("alpha", "base") == ["alpha", "base"]
    for command in (["status"], ["show"]):
        assert cli.main(command) == 0
        assert "alpha" in capsys.readouterr().out
    assert cli.main(["logs", "alpha"]) == 78
    assert "scratch/alpha/logs holds no logs yet" in capsys.readouterr().err
    assert cli.main(["export", "alpha"]) == 65
    assert "scratch/alpha has no checkpoint" in capsys.readouterr().err


def test_of_two_runs_with_one_name_that_of_the_last_command_is_meant(project):
    RecordedRun(project / "project/results/alpha").freeze_config()
    write_down(project / "scratch/alpha")
    (found,) = find_runs(["alpha"])
    assert found.root == project / "scratch/alpha"
    assert len(find_runs([])) == 2


def test_a_run_that_is_in_the_record_and_in_the_config_is_one(project):
    configure(project, f"results: {project}/scratch\n")
    write_down(project / "scratch/alpha")
    assert names() == ["alpha", "beta"]


def test_a_record_of_another_version_is_reported_and_hides_no_run(project, capsys):
    RecordedRun(project / "project/results/base").freeze_config()
    write_down(project / "scratch/alpha")
    WORKFLOW_RUNS.write_text('{"format": 9, "folders": {}}')
    assert names() == ["base"]
    assert "note: .snakemake/forge/runs.json has format 9" in capsys.readouterr().err


# --- a directory of the project that has the name of a run -----------------------------------------


@pytest.mark.parametrize("content", [[], ["config.json", "model.safetensors"]])
def test_run_is_meant_by_its_name_where_a_directory_of_weights_has_that_name_too(project, content):
    configure(project, f"results: {project}/scratch\n")
    weights = project / "project/alpha"
    weights.mkdir()
    for name in content:
        (weights / name).write_text('{"architectures": ["GPT2LMHeadModel"]}')
    (found,) = find_runs(["alpha"])
    assert found.root == project / "scratch/alpha"
    (there,) = find_runs(["./alpha/"])
    assert there.root.resolve() == weights
    weights.rename(project / "project/gamma")
    (only,) = find_runs(["gamma"])
    assert only.root.name == "gamma"


@pytest.mark.parametrize("name", ["config.json", "checkpoint.json", "forge.json"])
def test_directory_that_is_a_run_a_checkpoint_or_an_export_is_meant_itself(project, name):
    configure(project, f"results: {project}/scratch\n")
    (project / "project/alpha").mkdir()
    (project / "project/alpha" / name).write_text('{"run": "alpha"}')
    (found,) = find_runs(["alpha"])
    assert found.root.resolve() == project / "project/alpha"
