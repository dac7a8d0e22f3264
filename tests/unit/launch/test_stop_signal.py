"""A second signal during the last save must not kill it, and the first cause must be the told one."""

import errno
import os
import signal
from pathlib import Path

import pytest

from forge.core.events import STOP_CAUSES
from forge.launch.stop_signal import StopFlag


@pytest.fixture
def flag(tmp_path):
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    yield StopFlag(tmp_path / "STOP").install()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (signal.SIGTERM, "SIGTERM"),
        (signal.SIGUSR1, "SIGUSR1"),
        (signal.SIGINT, "Ctrl-C"),
    ],
)
def test_signal_sets_the_flag_and_nothing_else(flag, number, cause):
    assert flag.cause() == ""
    os.kill(os.getpid(), number)
    assert flag.cause() == cause
    assert cause in STOP_CAUSES


def test_file_system_with_a_hiccup_is_no_error_and_is_asked_again(tmp_path, monkeypatch):
    found = StopFlag(tmp_path / "STOP")
    (tmp_path / "STOP").touch()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", failing_exists)
        assert found.cause() == ""
    assert found.cause() == "STOP file"


def failing_exists(_path):
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def test_first_cause_wins_and_a_second_signal_is_ignored(flag, tmp_path):
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    (tmp_path / "STOP").touch()
    assert flag.cause() == "SIGUSR1"


def test_stop_file_asks_to_stop_and_stays_the_cause(flag, tmp_path):
    assert flag.cause() == ""
    (tmp_path / "STOP").touch()
    assert flag.cause() == "STOP file"
    (tmp_path / "STOP").unlink()
    os.kill(os.getpid(), signal.SIGTERM)
    assert flag.cause() == "STOP file"


def test_without_a_stop_file_only_signals_count():
    assert StopFlag().cause() == ""


def test_the_heavier_cause_is_the_later_one():
    """Ranks agree on the largest index, so what ends the job outweighs what only asks."""
    assert STOP_CAUSES == ("", "deadline", "STOP file", "SIGUSR1", "SIGTERM", "Ctrl-C")
