"""The environment of another training program."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from forge.core.errors import UnfitError
from forge.launch import program_rank


def test_program_under_the_staged_python_has_the_jobs_packages_and_its_own_modules(monkeypatch):
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    monkeypatch.setenv("PYTHONPATH", "/staged")
    for of_job, expected in (("/mine", "/mine:/staged"), ("", "/staged")):
        monkeypatch.setenv("FORGE_JOB_PYTHONPATH", of_job)
        found = program_rank._environment({"RANK": "3"})
        assert (found["PYTHONPATH"], found["RANK"]) == (expected, "3")
        assert not {"PYTHONSAFEPATH", "FORGE_JOB_PYTHONPATH"} & set(found)


def test_program_under_a_python_that_is_not_staged_has_the_jobs_environment(monkeypatch):
    monkeypatch.delenv("FORGE_JOB_PYTHONPATH", raising=False)
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    assert program_rank._environment({"RANK": "3"}) == {**os.environ, "RANK": "3"}


class Clock:
    """A child that runs while the clock passes these moments."""

    pid, returncode = 0, 0

    def __init__(self, moments):
        self.moments, self.now = list(moments), 0.0

    def poll(self):
        self.now = self.moments.pop(0) if self.moments else self.now
        return None if self.moments else 0


@pytest.mark.parametrize(
    ("moments", "is_hung"),
    [
        (range(1, 200), True),
        ([1, 2, 50, 3650, 3651, 3652], False),  # suspended, or a file system that did not answer
        ([1, 2, 50, 3650, *range(3651, 3720)], True),
    ],
)
def test_time_in_which_nobody_watched_is_no_sign_of_a_hang(tmp_path, monkeypatch, moments, is_hung):
    child = Clock(moments)
    monkeypatch.setattr(program_rank.time, "monotonic", lambda: child.now)
    monkeypatch.setattr(program_rank.time, "sleep", lambda _: None)
    monkeypatch.setattr(program_rank, "running_file", lambda *_: tmp_path / "running")
    beats = SimpleNamespace(timeout_sec=100, log=False)
    program = SimpleNamespace(heartbeat=beats, stop=SimpleNamespace(grace_sec=1))
    watch = program_rank._Watch(
        spec=SimpleNamespace(directory=tmp_path),
        task=SimpleNamespace(program=program, deadline=None, goal=None),
        paths=None,
        rank=SimpleNamespace(rank=0, is_main=True, world_size=1),
        stop=SimpleNamespace(cause=str),
        child=child,
        beat=tmp_path / "beat",
    )
    monkeypatch.setattr(watch, "_waits_for_another", lambda _: False)
    monkeypatch.setattr(watch, "_kill", child.moments.clear)
    monkeypatch.setattr(watch, "_record", lambda _: None)
    watch.until_it_ends()
    assert bool(watch.hung) is is_hung


def test_program_that_survives_kill_9_is_an_error_of_its_node(monkeypatch):
    monkeypatch.setattr(program_rank, "KILL_SEC", 0.1)
    monkeypatch.setattr(os, "killpg", lambda *_: None)  # it waits in the kernel
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(20)"]) as child:
        watch = program_rank._Watch(None, None, None, None, None, child, None)
        with pytest.raises(UnfitError, match=f"after kill -9: pid {child.pid}"):
            watch._kill()
        child.kill()
