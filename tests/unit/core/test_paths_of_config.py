"""`results: $SCRATCH/runs` once made a directory named "$SCRATCH", in the quota of the project."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from forge.core.config import Config, load_config
from forge.core.errors import ConfigError
from forge.core.machine import Machine
from forge.core.section import expanded
from forge.core.values import shown
from forge.data import content_ids


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("SCRATCH", "/scratch/ada")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.delenv("UNSET", raising=False)


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ("$SCRATCH/runs", "/scratch/ada/runs"),
        ("${SCRATCH}runs", "/scratch/adaruns"),
        ("a/$SCRATCH", "a//scratch/ada"),
        ("~/runs", "/home/ada/runs"),
        ("~", "/home/ada"),
        ("~root/runs", "/root/runs"),
        ("a/~/b", "a/~/b"),
        ("price$.txt", "price$.txt"),
        ("runs", "runs"),
    ],
)
def test_a_path_is_expanded_as_a_shell_does(written: str, path: str) -> None:
    assert expanded(written) == path


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("$UNSET/runs", "variable UNSET is not set"),
        ("$EMPTY/runs", "variable EMPTY is not set, or empty"),
        ("${SCRATCH:-x}/runs", "variable SCRATCH:-x is not set"),
        ("~nobody-here/runs", "~nobody-here is no home directory"),
    ],
)
@pytest.mark.parametrize("key", ["results", "data"])
def test_what_cannot_be_expanded_is_refused_by_key_and_name(
    tmp_path: Path, key: str, written: str, message: str
) -> None:
    (tmp_path / "c.yaml").write_text(json.dumps({key: written}))
    with pytest.raises(ConfigError, match=f"{key} is .*{message}"):
        load_config("c.yaml")


def test_every_path_of_a_config_is_expanded() -> None:
    one = ["$SCRATCH/x"]
    of_text = {
        "tokenizer": {"source": "path", "path": one[0]},
        "tokenize": {"inputs": [*one, "rule:$SCRATCH/y"]},
        "model": {"init": {"path": one[0]}},
        "evaluate": {"tasks": ["x"], "include_path": one[0]},
    }
    of_sources = {"tokenize": {"sources": {"web": {"inputs": one}}}}
    program = {"command": ["$SCRATCH"], "source": one[0], "inputs": one}
    program |= {"heartbeat": {"file": one[0]}}
    for values in (of_text, of_sources, {"program": program}):
        written = Config.model_validate(values).model_dump_json(exclude_unset=True, by_alias=True)
        assert "$SCRATCH/" not in written and "/scratch/ada/x" in written
    assert '"$SCRATCH"' in written  # words of a command, which has no shell


def test_paths_of_a_machine_are_expanded_but_for_those_inside_of_a_container() -> None:
    container = {"image": "~/forge.sif", "binds": ["$SCRATCH:/scratch"]}
    machine = Machine.model_validate({"stage": {"folder": "$SCRATCH"}, "container": container})
    assert machine.stage.folder == "/scratch/ada"
    assert machine.container and machine.container.image == "/home/ada/forge.sif"
    assert machine.container.binds == ["/scratch/ada:/scratch"]
    with pytest.raises(ValidationError, match="without variables"):
        Machine.model_validate({"container": {"image": "x", "python": "/$SCRATCH/python"}})


def test_config_json_has_the_expanded_path() -> None:
    config = content_ids.resolve(Config(results="$SCRATCH/runs", data="~/data"))
    values = config.training_json()
    assert (values["results"], values["data"]) == ("/scratch/ada/runs", "/home/ada/data")
    assert Config.model_validate(values).results == "/scratch/ada/runs"


def test_a_directory_that_an_earlier_version_made_stays_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "$SCRATCH/runs").mkdir(parents=True)
    config = content_ids.resolve(Config(results="$SCRATCH/runs"))
    assert config.results == "$SCRATCH/runs"
    assert f"{shown('$SCRATCH/runs')} is a directory of this name here" in capsys.readouterr().err
