"""The environment of another training program."""

import os

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
