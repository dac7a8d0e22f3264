"""Threat: a section that is read in part, or an evaluation of checkpoints that are not there."""

from pathlib import Path

import pytest
from support.recorded_run import RecordedRun

from forge import cli
from forge.core.config import Config, checked, load_config
from forge.core.errors import ConfigError
from forge.plugins.evaluation import command
from forge.plugins.evaluation.settings import Evaluate


def config_of(overrides):
    return load_config("/dev/null", overrides)


def test_errors_of_the_section_and_of_others_are_named_together():
    with pytest.raises(ConfigError) as error:
        config_of({"evaluate.task": ["words"], "evaluate.limit": 0, "train.max_steps": 0})
    said = str(error.value)
    assert "unknown key evaluate.task (did you mean tasks?)" in said
    assert "evaluate.limit is 0: Input should be greater than or equal to 1" in said
    assert "train.max_steps is 0" in said


def test_removed_key_is_named_beside_an_error_of_the_section():
    with pytest.raises(ConfigError) as error:
        config_of({"evaluate.limit": 0, "train.keep_pairs": True})
    said = str(error.value)
    assert "evaluate.limit is 0" in said and "train.keep_pairs is True: this key was" in said


def test_section_is_in_json_where_it_is_set_and_changes_no_digest(tmp_path):
    plain, tasks = config_of({}), config_of({"evaluate.tasks": ["words"]})
    assert "evaluate" not in plain.to_json() and plain.of(Evaluate) == Evaluate()
    assert tasks.to_json()["evaluate"]["tasks"] == ["words"]
    assert plain.training_json() == tasks.training_json()
    again = checked(Config, tasks.to_json(), "its JSON")
    assert again == tasks and again.model_copy(update={"run": "b"}).of(Evaluate).tasks == ["words"]


@pytest.mark.parametrize(
    ("keep_every", "every"), [(None, 100), (200, 100), (30, 100)], ids=["none", "more", "other"]
)
def test_evaluated_checkpoints_that_are_not_kept_are_refused_by_key_and_value(keep_every, every):
    values = {"evaluate.tasks": ["words"], "evaluate.every": every, "train.keep_every": keep_every}
    with pytest.raises(ConfigError, match=f"evaluate.every is {every}.* is {keep_every}; set it"):
        config_of(values)
    assert config_of({**values, "train.keep_every": 50}).of(Evaluate).every == every


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"tasks": ["a", "b", "a"]}, "a is named more than once"),
        ({"batch_size": "many"}, "must be auto, or a number of requests"),
        ({"batch_size": 0}, "must be auto, or a number of requests"),
        ({"limit": 0}, "greater than or equal to 1"),
    ],
)
def test_settings_of_an_evaluation_that_cannot_be_meant_are_refused(values, said):
    with pytest.raises(ConfigError, match=said):
        checked(Config, {"evaluate": values}, "config.yaml")


def test_tasks_for_the_checkpoints_of_another_program_are_refused():
    values = {"program": {"command": ["python", "train.py"]}, "evaluate": {"tasks": ["words"]}}
    with pytest.raises(
        ConfigError, match="evaluate is set, and it is for checkpoints of Forge's own"
    ):
        checked(Config, values, "config.yaml")


def test_run_is_meant_by_its_name_where_a_directory_has_that_name_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    RecordedRun(Path("results/gpt2")).freeze_config()
    Path("gpt2").mkdir()
    options = cli._parser().parse_args(["evaluate", "gpt2"])
    options.overrides = {}
    paths, checkpoint, _, _ = command._to_evaluate(options)
    assert (paths.root, checkpoint) == (Path("results/gpt2"), None)
