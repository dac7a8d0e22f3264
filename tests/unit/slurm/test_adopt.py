"""A second job into the directory of a run that trains must not be submitted."""

from types import SimpleNamespace

import pytest
from snakemake_executor_plugin_slurm import Executor as SlurmExecutor
from support.run_states import queued

from forge.slurm import adopt, jobs, slurm
from snakemake_executor_plugin_forge import Executor

FULL = "rule_allocation-base_preflight_run_stage_run_train_run"


class Recorder:
    """What take_back uses of the plugin's executor."""

    def __init__(self, folder):
        self.run_uuid, self.slurm_logdir, self.reported = "base_1", folder, []
        self.logger = SimpleNamespace(info=lambda text: None)
        self._report_job_submission_threadsafe = self.reported.append
        self._without_snakemake, self._submitted = set(), set()


def group(*rules):
    return SimpleNamespace(
        name="_".join(["allocation-base", *rules]), jobid="x", is_group=lambda: True
    )


def validation(run="base"):
    return SimpleNamespace(name="validate_run", wildcards=[run], jobid=3, is_group=lambda: False)


@pytest.fixture
def executor(tmp_path, monkeypatch):
    monkeypatch.setenv(adopt.CONTROLLED, "submitted-1.json")
    return Recorder(tmp_path)


def in_queue(monkeypatch, *listed):
    monkeypatch.setattr(jobs, "read_queue", lambda *_, **__: list(listed))


def training(state="RUNNING", comment=FULL, **facts):
    return queued(state, comment=comment, run=jobs.run_of(comment), **facts)


def test_rules_left_of_an_allocation_are_found_in_the_job_that_has_begun_them(
    executor, monkeypatch
):
    in_queue(monkeypatch, training("PENDING", id="9"), training(id="17"))
    assert adopt.take_back(executor, group("train_run")) == "RUNNING"
    [info] = executor.reported
    assert info.external_jobid == "17"
    log = info.aux["slurm_logfile"].relative_to(executor.slurm_logdir)
    assert str(log) == "group_allocation-base_preflight_run_stage_run_train_run/17.log"


def test_rule_is_found_by_its_wildcards(executor, monkeypatch):
    comment = "rule_validate_run_wildcards_base"
    in_queue(monkeypatch, queued(id="4", run=None, comment=comment))
    assert adopt.take_back(executor, validation("other")) == ""
    assert adopt.take_back(executor, validation()) == "RUNNING"
    log = executor.reported[0].aux["slurm_logfile"].relative_to(executor.slurm_logdir)
    assert str(log) == "rule_validate_run/base/4.log"


def test_job_that_this_command_watches_already_is_not_taken_for_another(executor, monkeypatch):
    """Groups of a user with the same rules have the same comment."""
    in_queue(monkeypatch, queued(id="4", run=None, comment="rule_mine_one_two"))
    mine = SimpleNamespace(name="mine_one_two", jobid="y", is_group=lambda: True)
    executor._submitted.add("4")
    assert adopt.take_back(executor, mine, look=True) == ""
    executor._submitted.clear()
    assert adopt.take_back(executor, mine, look=True) == "RUNNING"


@pytest.mark.parametrize("job", [group("train_run"), validation()])
def test_outputs_of_a_job_that_is_taken_back_are_not_marked_as_incomplete_again(
    executor, monkeypatch, job
):
    """Nothing takes the mark away where no Snakemake runs in the job: it would train again."""
    comment = "rule_validate_run_wildcards_base"
    in_queue(monkeypatch, training(id="17"), queued(id="4", run=None, comment=comment))
    marked = []
    monkeypatch.setattr(
        SlurmExecutor, "report_job_submission", lambda *_, register_job: marked.append(register_job)
    )
    forges = object.__new__(Executor)
    forges.__dict__ |= vars(executor)
    forges._report_job_submission_threadsafe = forges.report_job_submission
    assert adopt.take_back(forges, job) == "RUNNING"
    assert marked == [False]


@pytest.mark.parametrize(
    "other",
    [
        training("COMPLETED"),
        training("CANCELLED"),
        training(folder=adopt.Path("/")),
        training(comment="rule_allocation-base2_train_run"),
    ],
)
def test_jobs_that_have_ended_or_do_something_else_are_not_taken(executor, monkeypatch, other):
    in_queue(monkeypatch, other)
    assert adopt.take_back(executor, group("stage_run", "train_run")) == ""
    assert executor.reported == []


def test_nothing_is_submitted_beside_a_job_of_the_run_that_does_less(executor, monkeypatch):
    in_queue(monkeypatch, training(comment="rule_allocation-base_preflight_run_stage_run"))
    with pytest.raises(ConnectionError, match="job 17 of the same run, which does less"):
        adopt.take_back(executor, group("train_run"))


def test_silence_of_slurm_is_an_error_that_is_tried_again(executor, monkeypatch):
    def silent(*_, **__):
        raise slurm.SlurmSilent("no answer within 10 s")

    monkeypatch.setattr(jobs, "read_queue", silent)
    with pytest.raises(ConnectionError, match=slurm.CONTROLLER_AWAY):
        adopt.take_back(executor, validation())


def test_snakemake_in_a_terminal_takes_nothing_back(executor, monkeypatch):
    monkeypatch.delenv(adopt.CONTROLLED)
    monkeypatch.setattr(jobs, "read_queue", lambda *_, **__: pytest.fail("it was asked"))
    assert adopt.take_back(executor, validation()) == ""
    assert adopt.controlled_name() == ""


def test_name_depends_on_the_project_the_runs_and_how_they_were_submitted(tmp_path, monkeypatch):
    names = {adopt.job_name(["a", "b"], "submitted-1.json")}
    names.add(adopt.job_name(["a", "b"], "x/submitted-1.json"))
    assert len(names) == 1 and names.pop().startswith("a-b_")
    here = adopt.job_name(["a"], "submitted-1.json")
    assert adopt.job_name(["a"], "submitted-2.json") != here
    monkeypatch.chdir(tmp_path)
    assert adopt.job_name(["a"], "submitted-1.json") != here
