"""The section `program`: what is refused before anything starts."""

import pytest

from forge.core.config import Config, checked
from forge.core.errors import ConfigError
from forge.core.program_settings import filled

PROGRAM = {"command": ["python", "x.py", "{goal}"], "goal": 7, "checkpoints": {}}


def config(**keys):
    return checked(Config, {"program": PROGRAM | keys.pop("program", {}), **keys}, "config.yaml")


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ({"goal": None}, "goal is missing"),
        ({"checkpoints": None}, "goal is given without checkpoints"),
        ({"command": []}, "at least 1 item"),
        ({"command": ["a", "{checkpoint}"]}, "did you mean {checkpoints}"),
        ({"validate": ["a", "{checkpoints"]}, None),
        ({"command": ["a", '{"json": 1}', "f{n}"]}, None),
        ({"checkpoints": {"pattern": "model.pt"}}, "a plain name with one {step}"),
        ({"checkpoints": {"pattern": "a/{step}"}}, "a plain name with one {step}"),
        ({"checkpoints": {"complete": [""]}}, "'' names no file in a checkpoint"),
        ({"checkpoints": {"complete": ["/scratch/done"]}}, "'/scratch/done' names no file"),
        ({"checkpoints": {"complete": ["**/rng_{rank}*.pth", "a/**"]}}, None),
        ({"stop": {"signal": "SIGKILL"}}, "program.stop.signal"),
        ({"hearbeat": {}}, "did you mean heartbeat"),
    ],
)
def test_bad_keys_are_named(program, message):
    if message is None:
        assert config(program=program)
        return
    with pytest.raises(ConfigError, match=message.replace("{", r"\{").replace("}", r"\}")):
        config(program=program)


@pytest.mark.parametrize("section", ["model", "train", "tokenizer", "tokenize"])
def test_sections_of_forges_own_trainer_are_refused_beside_it(section):
    with pytest.raises(ConfigError, match=f"{section} would have no effect"):
        config(**{section: {}})


def test_goal_in_epochs_is_one_in_steps():
    assert config(program={"goal": {"epochs": 3, "steps_per_epoch": 250}}).goal == 750


def test_config_of_a_program_has_no_keys_of_forges_own_trainer():
    values = config().to_json()
    assert not {"model", "train", "tokenizer", "tokenize"} & set(values)
    assert checked(Config, values, "again") == config()


def test_only_known_placeholders_are_filled():
    assert filled('{goal} {"a": {goal}} {other}', {"goal": 7}) == '7 {"a": 7} {other}'
