"""What rank 0 says reaches the person once, also when it is read in the middle of a character."""

import errno
import json
import threading
import time
from pathlib import Path

import pytest

from forge.core import terminal
from forge.launch import rank_output
from forge.launch.rank_output import BAR, MESSAGES, Console, RankProgress


@pytest.fixture
def heard(monkeypatch):
    lines = []
    monkeypatch.setattr(rank_output, "say", lines.append)
    return lines


def test_each_line_is_shown_once_and_only_when_complete(tmp_path, heard):
    with Console(tmp_path) as launcher, open(tmp_path / MESSAGES, "ab", buffering=0) as rank:
        launcher.show()
        assert heard == []
        rank.write(b"one\ntw")
        launcher.show()
        launcher.show()
        assert heard == ["one"]
        rank.write(b"o\nthree\n")
        launcher.show()
        assert heard == ["one", "two", "three"]
        rank.write(b"four\n")
    assert heard == ["one", "two", "three", "four"]


@pytest.mark.parametrize("cut", range(1, len("µ → 語…".encode()) + 1))
def test_line_cut_within_a_character_is_not_lost(tmp_path, heard, cut):
    text = "µ → 語…\n".encode()
    with Console(tmp_path) as launcher, open(tmp_path / MESSAGES, "ab", buffering=0) as rank:
        rank.write(b"before\n" + text[:cut])
        launcher.show()
        rank.write(text[cut:] + "größer\n".encode())
    assert heard == ["before", "µ → 語…", "größer"]


def test_bytes_that_are_no_text_do_not_end_the_launch(tmp_path, heard):
    (tmp_path / MESSAGES).write_bytes(b"a\xff\r\nb\n")
    with Console(tmp_path) as launcher:
        launcher.show()
    assert heard == ["a\ufffd", "b"]


def test_what_a_rank_says_reaches_the_launcher(tmp_path, heard, monkeypatch):
    monkeypatch.setattr(terminal, "_copies", [])
    rank_output.speak_to_launcher(tmp_path)
    terminal.say("step 5 · loss 3.2\n  fix: 2 lines")
    with Console(tmp_path) as launcher:
        launcher.show()
    assert heard == ["step 5 · loss 3.2", "  fix: 2 lines"]  # the launcher's log adds the time
    terminal._copies.pop().close()


def test_bar_reaches_the_launcher_once_for_each_change(tmp_path, monkeypatch):
    drawn = []

    class Bar:
        def __init__(self, *facts):
            drawn.append(facts)

        def __enter__(self):
            return lambda done, note: drawn.append((done, note))

        def __exit__(self, *_):
            drawn.append("closed")

    monkeypatch.setattr(terminal, "progress", Bar)
    bar = RankProgress(tmp_path, "train", 10, "steps")
    with Console(tmp_path) as launcher:
        launcher.show()
        bar(1, "loss 5")
        launcher.show()
        launcher.show()
        bar(10, "loss 4")  # the last one is never held back
    assert drawn == [("train", 10, "steps"), (1, "loss 5"), (10, "loss 4"), "closed"]


def test_bar_does_not_write_a_file_for_every_step(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_output, "BAR_EVERY_SEC", 60.0)
    bar = RankProgress(tmp_path, "train", 10, "steps")
    for done in range(1, 10):
        bar(done)
    assert json.loads((tmp_path / BAR).read_text())["done"] == 1


def test_log_is_shown_from_its_end_on(tmp_path, heard):
    log = tmp_path / "rank.log"
    log.write_text("before\n")
    rank_output.send_log(tmp_path, log)
    with Console(tmp_path), open(log, "a", buffering=1) as file:
        file.write("  of the program\n")
        terminal.write("of Forge", file)
    assert heard == ["  of the program", "of Forge"]


def test_log_takes_the_place_of_messages_that_the_launcher_follows_already(tmp_path, heard):
    """The launcher once looked between the two, found no file, and killed the ranks."""
    log = tmp_path / "rank.log"
    log.write_text("before\n")
    (tmp_path / MESSAGES).write_text("hello\n")
    with Console(tmp_path) as launcher:
        launcher.show()
        (tmp_path / MESSAGES).rename(tmp_path / "moved")
        launcher.show()
        (tmp_path / "moved").rename(tmp_path / MESSAGES)
        rank_output.send_log(tmp_path, log)
        with open(log, "a", buffering=1) as file:
            file.write("after\n")
    assert heard == ["hello", "after"]


def test_messages_are_there_whenever_the_launcher_looks(tmp_path):
    messages, log = tmp_path / MESSAGES, tmp_path / "rank.log"
    messages.write_text("")
    log.write_text("")
    missing, done = [], threading.Event()

    def look():
        while not done.is_set():
            try:
                open(messages, "rb").close()
            except FileNotFoundError:
                missing.append(1)

    looker = threading.Thread(target=look)
    looker.start()
    for _ in range(2000):
        rank_output.send_log(tmp_path, log)
    done.set()
    looker.join()
    assert not missing


def test_full_disk_leaves_no_start_that_the_launcher_cannot_read(tmp_path, monkeypatch):
    """The launcher once found an empty file, and ended with a traceback."""
    log = tmp_path / "rank.log"
    log.write_text("before\n")
    (tmp_path / rank_output.MESSAGES).write_text("")

    def full(path, text):
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    rank_output.send_log(tmp_path, log)
    assert not (tmp_path / rank_output.START).exists()
    with Console(tmp_path) as launcher:
        launcher.show()


def test_progress_of_a_command_without_a_terminal_is_shown_by_the_one_that_has_it(
    tmp_path, monkeypatch
):
    """Also of a launch that takes the place of one whose rank was lost; none is there at first."""
    shown: list[str] = []
    monkeypatch.setattr(terminal, "PLAIN_EVERY_SEC", 0.0)
    monkeypatch.setattr(terminal, "say", shown.append)
    launches = tmp_path / ".launch"
    with rank_output.shown_bar(launches):
        for name, step in (("first", 3), ("second", 7)):
            (launches / name).mkdir(parents=True)
            RankProgress(launches / name, "train again", 9, "steps")(step, "loss 2.5")
            wanted, end = f"train again: {step}/9 steps loss 2.5", time.monotonic() + 60
            while wanted not in shown and time.monotonic() < end:
                time.sleep(0.01)
            assert shown[-1] == wanted
        (launches / "second" / BAR).unlink()  # as a launch ends
    assert len(shown) == 2
