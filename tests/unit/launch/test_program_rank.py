"""The environment of another training program."""

import os
import subprocess
import sys

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


def test_program_that_survives_kill_9_is_an_error_of_its_node(monkeypatch):
    monkeypatch.setattr(program_rank, "KILL_SEC", 0.1)
    monkeypatch.setattr(os, "killpg", lambda *_: None)  # it waits in the kernel
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(20)"]) as child:
        watch = program_rank._Watch(None, None, None, None, None, child, None)
        with pytest.raises(UnfitError, match=f"after kill -9: pid {child.pid}"):
            watch._kill()
        child.kill()
