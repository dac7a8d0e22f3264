"""Status, report and the crash-loop limit rest on the event log: what is written is what is read."""

import json

import pytest
from pydantic import ValidationError
from support import happenings

from forge.core import events
from forge.core.errors import OtherFormat


@pytest.mark.parametrize("event", happenings.ALL, ids=lambda event: event.event)
def test_event_is_read_as_it_was_written(tmp_path, event):
    log = tmp_path / "run" / "events.jsonl"
    events.record(log, event)
    assert events.read(log) == [event]


def test_every_kind_of_event_is_read_back():
    kinds = {kind.__name__.lower() for kind in _leaves(events.Event)}
    assert kinds == {event.event for event in happenings.ALL}


def _leaves(kind):
    below = [one for one in kind.__subclasses__() if one.__module__ == events.__name__]
    return {leaf for each in below for leaf in _leaves(each)} if below else {kind}


def test_events_are_read_in_the_order_they_were_written(tmp_path):
    log = tmp_path / "events.jsonl"
    events.record(log, happenings.launch())
    events.record(log, happenings.stop(cause="größer"))
    first, second = events.read(log)
    assert isinstance(first, events.Launch) and second.cause == "größer"
    assert 0 < first.time <= second.time


def test_no_file_has_no_events(tmp_path):
    assert events.read(tmp_path / "events.jsonl") == []


@pytest.mark.parametrize(
    "line", ['{"event": "stop"', "7", "{}", '{"event": 1}', '{"event": "stop", "format": 1}']
)
def test_line_that_is_no_event_is_passed_over(tmp_path, line):
    log = tmp_path / "events.jsonl"
    events.record(log, happenings.launch())
    with open(log, "a") as file:
        file.write(f"{line}\n")
    events.record(log, happenings.stop())
    assert [event.event for event in events.read(log)] == ["launch", "stop"]


@pytest.mark.parametrize("other", [None, 0, 2, "1"])
def test_log_of_another_version_is_refused_by_its_format(tmp_path, other):
    log = tmp_path / "events.jsonl"
    events.record(log, happenings.launch())
    with open(log, "a") as file:
        file.write(json.dumps({"event": "launch", "format": other}) + "\n")
    with pytest.raises(
        OtherFormat, match=f"event `launch` in .* has format {other!r}, this"
    ) as caught:
        events.read(log)
    assert str(log) in str(caught.value) and "new run name" in str(caught.value)


def test_fact_that_an_event_does_not_have_is_a_mistake_of_ours():
    with pytest.raises(ValidationError, match="slurm_job"):
        events.Stop(cause="STOP file", step=1, slurm_job="12")
