"""Goodput and every picture come from the ledger: a crash in a write may cost that line, no other."""

import json
import multiprocessing
import os
from pathlib import Path

import pytest

from forge.core import event_log
from forge.core.errors import UnfitError


def test_events_are_read_in_the_order_they_were_written(tmp_path):
    events = tmp_path / "run" / "events.jsonl"
    event_log.record(events, "launch", rank=0)
    event_log.record(events, "stop", cause="größer")
    first, second = event_log.read_lines(events)
    assert (first["event"], first["rank"]) == ("launch", 0)
    assert (second["event"], second["cause"]) == ("stop", "größer")
    assert 0 < first["time"] <= second["time"]


def test_no_file_has_no_events(tmp_path):
    assert event_log.read_lines(tmp_path / "events.jsonl") == []


@pytest.mark.parametrize("line", ["9" * 5000, "[" * 9999, "7", "[]", "{}", '{"event": 1}'])
def test_line_that_is_no_event_is_passed_over(tmp_path, line):
    events = tmp_path / "events.jsonl"
    event_log.record(events, "launch")
    with open(events, "a") as file:
        file.write(f"{line}\n")
    event_log.record(events, "stop")
    assert [event["event"] for event in event_log.read_events(events)] == ["launch", "stop"]


@pytest.mark.parametrize("kept", [1, 20, -1])
def test_line_cut_by_a_crash_spoils_itself_only(tmp_path, kept):
    events = tmp_path / "events.jsonl"
    for step in (1, 2):
        event_log.append_line(events, {"event": "save", "step": step})
    whole = events.read_bytes()
    first = whole.index(b"\n") + 1
    cut = len(whole) - 2 if kept == -1 else first + kept
    os.truncate(events, cut)
    event_log.append_line(events, {"event": "save", "step": 3})
    assert [line["step"] for line in event_log.read_lines(events)] == [1, 3]


def test_line_that_lost_only_its_end_is_kept(tmp_path):
    events = tmp_path / "events.jsonl"
    event_log.append_line(events, {"step": 1})
    os.truncate(events, events.stat().st_size - 1)
    event_log.append_line(events, {"step": 2})
    assert event_log.read_lines(events) == [{"step": 1}, {"step": 2}]


def test_bytes_that_are_no_text_spoil_their_line_only(tmp_path):
    events = tmp_path / "events.jsonl"
    events.write_bytes(b'{"step": 1}\n\xff\x00\xfe\n[1]\n{"step": 2}\n')
    assert event_log.read_lines(events) == [{"step": 1}, {"step": 2}]


def _append_many(path, writer):
    for number in range(100):
        event_log.append_line(path, {"writer": writer, "number": number, "text": "x" * 500})


def test_lines_of_several_writers_never_mix(tmp_path):
    events = tmp_path / "events.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_append_many, args=(events, n)) for n in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    lines = [json.loads(line) for line in events.read_text().splitlines() if line]
    for writer in range(3):
        assert [n["number"] for n in lines if n["writer"] == writer] == list(range(100))


def test_full_disk_is_unfit():
    with pytest.raises(UnfitError, match="/dev/full: No space left on device"):
        event_log.append_line(Path("/dev/full"), {"step": 1})


def test_numbers_that_are_no_json_are_refused(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        event_log.append_line(tmp_path / "events.jsonl", {"loss": float("nan")})
    assert not (tmp_path / "events.jsonl").exists()
