"""Goodput and every picture come from these files: a crash in a write may cost that line, no other."""

import json
import multiprocessing
import os
from pathlib import Path

import pytest

from forge.core import json_lines
from forge.core.errors import UnfitError


def test_no_file_has_no_lines(tmp_path):
    assert json_lines.read(tmp_path / "events.jsonl") == []


@pytest.mark.parametrize("line", ["9" * 5000, "[" * 9999, "7", "[]"])
def test_line_that_is_no_object_is_passed_over(tmp_path, line):
    events = tmp_path / "events.jsonl"
    events.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    assert json_lines.read(events) == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize("kept", [1, 20, -1])
def test_line_cut_by_a_crash_spoils_itself_only(tmp_path, kept):
    events = tmp_path / "events.jsonl"
    for step in (1, 2):
        json_lines.append(events, {"event": "save", "step": step})
    whole = events.read_bytes()
    first = whole.index(b"\n") + 1
    cut = len(whole) - 2 if kept == -1 else first + kept
    os.truncate(events, cut)
    json_lines.append(events, {"event": "save", "step": 3})
    assert [line["step"] for line in json_lines.read(events)] == [1, 3]


def test_line_that_lost_only_its_end_is_kept(tmp_path):
    events = tmp_path / "events.jsonl"
    json_lines.append(events, {"step": 1})
    os.truncate(events, events.stat().st_size - 1)
    json_lines.append(events, {"step": 2})
    assert json_lines.read(events) == [{"step": 1}, {"step": 2}]


def test_bytes_that_are_no_text_spoil_their_line_only(tmp_path):
    events = tmp_path / "events.jsonl"
    events.write_bytes(b'{"step": 1}\n\xff\x00\xfe\n[1]\n{"step": 2}\n')
    assert json_lines.read(events) == [{"step": 1}, {"step": 2}]


def _append_many(path, writer):
    for number in range(100):
        json_lines.append(path, {"writer": writer, "number": number, "text": "x" * 500})


def test_lines_of_several_writers_never_mix(tmp_path):
    events = tmp_path / "events.jsonl"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_append_many, args=(events, n)) for n in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    lines = [json.loads(line) for line in events.read_text().splitlines() if line]
    for writer in range(3):
        assert [n["number"] for n in lines if n["writer"] == writer] == list(range(100))


def test_full_disk_is_unfit():
    with pytest.raises(UnfitError, match="/dev/full: No space left on device"):
        json_lines.append(Path("/dev/full"), {"step": 1})


def test_numbers_that_are_no_json_are_refused(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_lines.append(tmp_path / "events.jsonl", {"loss": float("nan")})
    assert not (tmp_path / "events.jsonl").exists()


def test_follower_goes_on_behind_a_progress_bar_that_ends_no_line(tmp_path):
    """A program draws it with \\r alone: `forge logs --follow` showed nothing after 1 MiB of it."""
    log = tmp_path / "log"
    bar = "\r 7%|steps" * (2 * json_lines.Follower.BLOCK // 10)
    log.write_text(f"begun\n{bar}")
    follower, read = json_lines.Follower(log), []
    while lines := follower.new_lines():
        read += lines
    with open(log, "a") as file:
        file.write("done\nnext\nhalf a")
    while lines := follower.new_lines():
        read += lines
    assert (read[0], read[-1]) == ("begun", "next")
    assert "".join(read[1:-1]) == f"{bar}done"


def test_link_in_a_run_from_elsewhere_has_nothing_appended_to_its_target(tmp_path):
    (tmp_path / ".bashrc").write_text("# mine\n")
    (tmp_path / "events.jsonl").symlink_to(tmp_path / ".bashrc")
    with pytest.raises(UnfitError, match="a symbolic link is there"):
        json_lines.append(tmp_path / "events.jsonl", {"event": "$(touch pwned)"})
    assert (tmp_path / ".bashrc").read_text() == "# mine\n"
