"""`forge status` said "no runs" where the config keeps them in another folder."""

import pytest
from support.recorded_run import RecordedRun

from forge import cli
from forge.core.errors import ConfigError
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
    assert caught.value.fix == f"runs in {project}/scratch: alpha, beta"


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
