"""A program of the user's must not delay the controller, and hears of each end once."""

import json
import os
import sys
import time

import pytest
from support.run_states import GOAL, KINDS, QUEUE, new_run

from forge.plugins.controller import notify
from forge.plugins.controller.notify import Notifier, events_of
from forge.reporting.run_files import RunFiles
from forge.reporting.run_state import judge

EVENT = {"event": "run ended", "run": "base"}


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr(notify, "say", lines.append)
    return lines


def python(code):
    return [sys.executable, "-c", code]


def test_event_arrives_as_json_on_standard_input(tmp_path, said):
    file = tmp_path / "told"
    notifier = Notifier(["tee", str(file)])
    notifier.call(EVENT)
    notifier.finish()
    told = json.loads(file.read_text())
    assert (told["event"], told["run"]) == ("run ended", "base") and told["time"] and not said


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["/nowhere/program"], "/nowhere/program was not started"),
        (python("import sys; sys.exit(3)"), r"ended with status 3"),
    ],
)
def test_failure_is_one_line(said, command, words):
    notifier = Notifier(command)
    notifier.call(EVENT)
    notifier.finish()
    assert len(said) == 1 and words in said[0]


def test_without_room_for_the_event_the_controller_goes_on(tmp_path, said, monkeypatch):
    monkeypatch.setattr(notify.tempfile, "tempdir", str(tmp_path / "gone"))
    notifier = Notifier(["true"])
    notifier.call(EVENT)
    notifier.finish()
    assert len(said) == 1 and "notify.command true was not started" in said[0]


def test_program_that_never_ends_is_killed_and_never_waited_for(monkeypatch, said):
    monkeypatch.setattr(notify, "LIMIT_SEC", 0.5)
    notifier = Notifier(python("import time; time.sleep(600)"))
    begin = time.monotonic()
    notifier.call({**EVENT, "long": "x" * 10**6})  # more than a pipe takes
    assert notifier.reap()
    assert time.monotonic() - begin < 0.5
    notifier.finish()
    assert said == ["warning: notify.command (run ended) was killed after 0.5 s"]


def test_without_a_command_nothing_is_started(said):
    notifier = Notifier([])
    notifier.call(EVENT)
    assert not notifier.reap() and said == []


def state(tmp_path, **changes):
    run = new_run(tmp_path / "base")
    values = vars(judge(RunFiles(run.paths), []))
    return type(judge(RunFiles(run.paths), []))(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "ended", "told"),
    [
        ({"state": "validated"}, False, ("base: validated", "run ended")),
        ({"state": "failed"}, False, ("base: failed", "run ended")),
        (
            {"state": "waiting", "next": "scontrol release 7"},
            False,
            ("base: needs a person", "run needs a person"),
        ),
        (  # whatever was told of this run before
            {"state": "running", "next": "forge reproduce", "finding": "NOT reproduced: 9"},
            False,
            ("base: NOT reproduced: 9", "run needs a person"),
        ),
        ({"state": "waiting", "next": ""}, False, None),
        ({"state": "cut off", "next": "rerun the command"}, False, None),  # it starts again
        ({"state": "cut off", "next": "rerun the command"}, True, ("base: cut off", "run ended")),
        ({"state": "not started"}, True, None),
    ],
)
def test_only_ends_and_what_a_person_must_do_are_told(tmp_path, changes, ended, told):
    found = [(k, e["event"]) for k, e in events_of([state(tmp_path, **changes)], ended=ended)]
    assert found == ([told] if told else [])


# --- ends of before the submission ------------------------------------------------------------------


@pytest.fixture
def ended_since(tmp_path, monkeypatch):
    """The states of the run of this name, without an end of before this time."""
    monkeypatch.setattr(notify, "ask_slurm", lambda _: (QUEUE, ""))

    def states(name, since):
        return [one.state for one in notify.states_of({name: str(tmp_path / name)}, since)]

    return states


@pytest.mark.parametrize("name", [*KINDS])
def test_every_end_of_before_is_left_out_and_no_run_under_way(tmp_path, ended_since, name):
    make, state, _ = KINDS[name]
    make(new_run(tmp_path / name))
    assert ended_since(name, 0.0) == [state]
    under_way = [state] if state in ("waiting", "running") else []
    assert ended_since(name, time.time() + 1000) == under_way


def test_validation_counts_where_the_training_had_ended_before(tmp_path, ended_since):
    run = new_run(tmp_path / "base")
    KINDS["done"][0](run)
    submitted = run.time + 100
    run.time += 200
    run.validate(GOAL)
    assert ended_since("base", submitted) == ["validated"]


def test_old_failure_is_not_told_because_a_preflight_passes_or_a_log_is_newer(
    tmp_path, ended_since
):
    run = new_run(tmp_path / "base")
    KINDS["failed"][0](run)
    submitted = run.time + 100
    run.time += 200
    run.preflight()
    run.paths.logs.mkdir()
    (run.paths.logs / "config.log").write_text("wrote config.json\n")
    assert ended_since("base", submitted) == []


def test_failure_that_only_a_log_tells_counts_by_its_time(tmp_path, ended_since):
    run = new_run(tmp_path / "base")
    KINDS["unstaged"][0](run)
    assert ended_since("base", time.time() - 100) == ["failed"]
    os.utime(run.paths.logs / "stage.log", (time.time() - 200,) * 2)
    assert ended_since("base", time.time() - 100) == []
