"""A statement must tell of no directory, machine or hour of its author, and stay one that is verified."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from forge.attestation.verify import VerificationError
from forge.core.records import LaunchEnvironment
from forge.plugins.attestation import recipe_of_trainer
from forge.plugins.attestation.chain import (
    ConfigUsed,
    EnvironmentUsed,
    LaunchesMade,
    LaunchMade,
    TextFile,
    Texts,
)
from forge.plugins.attestation.reduce import absolute_paths, reduced, stated_values, without_folders
from forge.plugins.attestation.statement import _note

LAUNCH = LaunchMade(
    **{"started": 1.8e9, "ended": 1.8e9 + 60.25, "world_size": 2, "nodes": 1},
    **{"resumed_from": 0, "last_step": 4, "outcome": "completed"},
)


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("/n/lab/alice/texts", ".../texts"),
        ("/n/lab/alice/texts/", ".../texts"),
        ("~alice/texts", ".../texts"),
        ("~/texts", ".../texts"),
        ("--to=/home/alice/out", "--to=.../out"),
        ("cd /home/alice/run && python /opt/x/train.py", "cd .../run && python .../train.py"),
        ("PATH=/home/alice/bin:/usr/bin", "PATH=.../bin:.../bin"),
        ("'/home/alice/a b'", "'.../a b'"),
        ("/n/my lab/alice/texts, old (2)", ".../texts, old (2)"),
        ("~alice/my texts/a.txt", ".../a.txt"),
    ],
)
def test_absolute_paths_keep_their_last_names(text, short):
    assert without_folders(text) == short


@pytest.mark.parametrize(
    "text",
    [
        "corpus",
        "data/corpus",
        "../corpus",
        "https://example.org/a/b",
        "hf:org/name",
        "a/b",
        "<|/s|>",
        "/",
        "//",
        " / ",
    ],
)
def test_relative_paths_addresses_and_other_texts_stay(text):
    assert without_folders(text) == text
    assert not [*absolute_paths(text)]


@pytest.mark.parametrize("section", ["tokenize", "settings"])
def test_text_settings_that_look_like_paths_stay_and_paths_beside_them_do_not(section):
    """With a part of the separator in it a statement did not give its tokens again."""
    text = {"document_separator": "/* --- */", "text_field": "/body/text", "eos_token": "/s"}
    values = {section: {**text, "sources": {"code": text}}}
    assert without_folders(values) == values
    assert not [*absolute_paths(values)]
    values[section]["inputs"] = ["/home/alice/texts"]
    assert without_folders(values)[section] == {**values[section], "inputs": [".../texts"]}
    assert [*absolute_paths(values)] == ["/home/alice/texts"]


def test_names_of_texts_keep_what_is_below_the_directory_of_the_config():
    texts = Texts(
        files={"": [{"name": "/home/alice/texts/a/00.txt", "bytes": 1, "blake3": "b"}]}  # type: ignore[list-item]
    )
    config = ConfigUsed(blake3="c", values={"tokenize": {"inputs": ["/home/alice/texts"]}})
    made, hidden = reduced([texts, config])
    assert isinstance(made, Texts)
    assert made.files is not None
    assert made.files[""][0].name == ".../texts/a/00.txt"
    assert isinstance(hidden, ConfigUsed)
    assert (hidden.values, hidden.blake3) == (None, "c")
    assert hidden.without_folders == {"tokenize": {"inputs": [".../texts"]}}


def test_config_without_absolute_paths_stays_with_its_values_and_bytes():
    config = ConfigUsed(blake3="c", values={"tokenize": {"inputs": ["corpus"]}})
    assert reduced([config]) == [config]
    assert config.model_dump().keys() == {"link", "previous", "blake3", "values"}


def test_times_are_those_since_the_first_launch_and_packages_and_variables_are_left_out():
    later = LAUNCH.model_copy(update={"started": 1.8e9 + 100, "ended": 1.8e9 + 200})
    environment = EnvironmentUsed(
        versions=None,
        packages={"torch": "2"},
        cpu="EPYC",
        numerics=None,
        launch=LaunchEnvironment(variables=["LAB_TOKEN"], container=None),
    )
    launches, around = reduced([LaunchesMade(launches=[LAUNCH, later]), environment])
    assert isinstance(launches, LaunchesMade)
    assert [(one.started, one.ended) for one in launches.launches] == [(0.0, 60.2), (100.0, 200.0)]
    assert isinstance(around, EnvironmentUsed)
    assert (around.packages, around.launch, around.cpu) == (None, None, "EPYC")


def test_launch_has_how_it_ended_and_nothing_of_the_message():
    told = {
        "completed": "completed",
        "stopped: SIGTERM": "stopped",
        "cut off: lost a rank: rank 1 of 2 exited without a record on node07": "cut off",
        "failed: rank 0: cannot write /scratch/alice/base: No space left": "failed",
        "no end recorded: it still runs or was killed": "no end recorded",
    }
    launches = [LAUNCH.model_copy(update={"outcome": outcome}) for outcome in told]
    [short] = reduced([LaunchesMade(launches=launches)])
    assert isinstance(short, LaunchesMade)
    assert [one.outcome for one in short.launches] == [*told.values()]


def test_note_on_paths_counts_those_of_messages_only_where_they_are_published():
    failed = LAUNCH.model_copy(update={"outcome": "failed: cannot write /scratch/alice/base"})
    named = TextFile(name="/texts/a.txt", bytes=1, blake3="b")
    texts = Texts(files={"": [named]})
    links = [texts, LaunchesMade(launches=[failed])]
    assert "of 1 absolute paths, such as /texts/a.txt, it has the last names" in _note(links, False)
    assert "it has 2 absolute paths, such as /scratch/alice/base" in _note(links, True)
    assert _note(links[1:], False) == ""


def test_values_are_read_in_either_form_and_their_lack_is_said():
    assert stated_values({"config": {"values": {"a": 1}}}) == {"a": 1}
    assert stated_values({"config": {"values": None, "without_folders": {"a": 2}}}) == {"a": 2}
    with pytest.raises(VerificationError, match="no values"):
        stated_values({"config": {"values": None}})


def test_run_that_began_with_weights_or_a_run_is_retrained_by_what_its_checkpoint_names():
    """The statement has last names alone, and a changed `parent` would not fit the checkpoint."""
    values = {"model": {"dim": 8, "init": {"path": ".../gpt2"}}, "parent": ".../base@4"}
    model = SimpleNamespace(init={"path": "/home/alice/gpt2"})
    config = SimpleNamespace(model=model, parent="base@4")
    lineage = SimpleNamespace(config=config)
    begin: Any = SimpleNamespace(manifest=SimpleNamespace(lineage=lineage))
    interval = SimpleNamespace(begin=begin)
    assert recipe_of_trainer._start(values, interval) == {  # type: ignore[arg-type]
        "parent": "base@4",
        "model": {"dim": 8, "init": {"path": "/home/alice/gpt2"}},
    }
    assert recipe_of_trainer._start(values, SimpleNamespace(begin=None)) == {}  # type: ignore[arg-type]
