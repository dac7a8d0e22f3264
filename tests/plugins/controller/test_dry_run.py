"""A plan that `forge submit` gets wrong would be submitted without the checks of a start."""

from types import SimpleNamespace

import pytest

from forge.core import hooks
from forge.core.errors import DataError, UnfitError
from forge.plugins.controller import controller_job
from forge.plugins.controller.places import CHECKS, SUBMIT_CHECK
from forge.plugins.controller.records import SubmitCheck
from forge.slurm import adopt


@pytest.fixture
def answered(tmp_path, monkeypatch):
    """What is written down at the end of a dry run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(CHECKS, "1")

    def answered(flow=None, refusal=None):
        hooks.after_dry_run(flow, refusal)
        return SubmitCheck.read_if_there(SUBMIT_CHECK)

    return answered


def job(rule, **params):
    return SimpleNamespace(
        rule=SimpleNamespace(name=rule), output=["made"], params=SimpleNamespace(**params)
    )


def test_refusal_is_written_down_with_its_code(answered):
    found = answered(refusal=DataError("the tokens are gone", fix="make them"))
    assert (found.code, found.refused) == (65, "the tokens are gone\n  fix:   make them")


def test_plan_without_jobs_is_accepted(answered):
    assert answered(SimpleNamespace(due=[])) == SubmitCheck()


def test_command_whose_jobs_run_on_this_machine_is_refused(answered):
    found = answered(SimpleNamespace(due=[job("train_run")], executor=""))
    assert found.code == 78
    assert "run by the executor local, not by forge" in found.refused


def test_runs_that_have_all_failed_before_are_refused_with_their_errors(answered):
    due = [
        job("known_failure_run", message="a: diverged"),
        job("known_failure_run", message="b: x"),
    ]
    found = answered(SimpleNamespace(due=due, executor="forge"))
    assert (found.code, found.refused) == (70, "a: diverged\nb: x")


def test_other_dry_runs_write_nothing(answered, monkeypatch):
    monkeypatch.delenv(CHECKS)
    assert answered(refusal=DataError("the tokens are gone")) is None


def test_snakemake_beside_a_controller_is_refused_and_that_of_the_controller_is_not(monkeypatch):
    def refuse(runs):
        raise UnfitError("the controller has them")

    monkeypatch.setattr(controller_job, "refuse_living", refuse)
    monkeypatch.delenv(adopt.CONTROLLED, raising=False)
    with pytest.raises(UnfitError, match="the controller has them"):
        hooks.check_plan({}, {})
    monkeypatch.setenv(adopt.CONTROLLED, "submitted-1.json")
    hooks.check_plan({}, {})
