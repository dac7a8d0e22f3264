"""What follows a stop is decided by its recorded cause, and a guard just before the call."""

import contextlib
from dataclasses import replace

import pytest

from forge.core import json_lines
from forge.core.errors import UnfitError
from forge.core.machine import load_machine
from forge.core.paths import RunPaths
from forge.hosts.placement import Placement
from forge.launch.rank_records import RankRecord
from forge.run import requeue
from forge.slurm import slurm

JOB = slurm.Job("42", "RUNNING", 0, ("n1", "n2"), 1, "gpu", "x", True, None)


@pytest.fixture
def slurm_says(monkeypatch):
    """Slurm's state of the job; what was requeued."""
    requeued = []

    def set_state(job):
        monkeypatch.setattr(slurm, "show_job", lambda _: job)
        monkeypatch.setattr(
            slurm, "requeue", lambda job_id, _restarts: requeued.append(job_id) or ""
        )
        monkeypatch.setattr(requeue, "_catch_signals", list)
        monkeypatch.setattr(requeue, "_wait_for_the_end", lambda _: None)
        return requeued

    return set_state


def ask(tmp_path, cause, *, job=JOB, step=5, **keys):
    """Why the job was not requeued; "" when it was."""
    record = RankRecord("stopped", cause=cause)
    machine = load_machine(None, keys)
    _, reason = requeue.requeue(record, RunPaths(tmp_path), job, machine, step=step)
    return reason


@pytest.mark.parametrize("cause", ["SIGUSR1", "SIGTERM", "peer lost"])
def test_what_the_cluster_caused_is_requeued(tmp_path, slurm_says, cause):
    requeued = slurm_says(JOB)
    assert ask(tmp_path, cause) == ""
    assert requeued == ["42"]


@pytest.mark.parametrize("cause", ["STOP file", "Ctrl-C"])
def test_what_a_person_asked_for_stays_ended(tmp_path, slurm_says, cause):
    requeued = slurm_says(JOB)
    assert cause in ask(tmp_path, cause)
    assert requeued == []


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (replace(JOB, state="COMPLETING"), "was cancelled"),
        (None, "gone"),
        (replace(JOB, state="PENDING"), "Slurm has already requeued job 42"),
        (replace(JOB, restarts=1), "Slurm has already requeued job 42"),
        (replace(JOB, batch=False), "interactive"),
    ],
)
def test_the_guard_reads_the_jobs_state_of_now(tmp_path, slurm_says, job, reason):
    requeued = slurm_says(job)
    assert reason in ask(tmp_path, "SIGTERM")
    assert requeued == []


@pytest.mark.parametrize("state", slurm.RUNNING)
def test_a_signal_on_its_way_to_a_dead_node_is_no_cancellation(tmp_path, slurm_says, state):
    requeued = slurm_says(replace(JOB, state=state))
    assert not requeue.was_cancelled(Placement(("n1",), JOB))
    assert ask(tmp_path, "peer lost") == ""
    assert requeued == ["42"]


@pytest.mark.parametrize("state", [*slurm.ENDING, *slurm.ENDED])
def test_a_job_that_slurm_ends_is_not_requeued(tmp_path, slurm_says, state):
    requeued = slurm_says(replace(JOB, state=state))
    assert requeue.was_cancelled(Placement(("n1",), JOB))
    assert f"is {state}: it was cancelled" in ask(tmp_path, "peer lost")
    assert requeued == []


def test_a_cancellation_between_the_guard_and_the_call_is_reported(
    tmp_path, slurm_says, monkeypatch
):
    slurm_says(JOB)
    monkeypatch.setattr(slurm, "requeue", lambda *_: "it is COMPLETING: it was cancelled meanwhile")
    assert "it was cancelled meanwhile" in ask(tmp_path, "SIGTERM")


def test_a_stop_file_that_came_meanwhile_keeps_the_job_ended(tmp_path, slurm_says):
    requeued = slurm_says(JOB)
    RunPaths(tmp_path).stop.touch()
    assert "STOP asks it to stop" in ask(tmp_path, "SIGTERM")
    assert requeued == []


def test_a_controller_that_is_away_ends_the_run_as_it_would_end_without_slurm(
    tmp_path, monkeypatch
):
    def away(_job_id):
        raise slurm.silent("Unable to contact slurm controller")

    monkeypatch.setattr(slurm, "show_job", away)
    assert "Slurm does not answer" in ask(tmp_path, "SIGTERM")
    assert not requeue.was_cancelled(Placement(("n1",), JOB))


def test_restarts_are_capped(tmp_path, slurm_says):
    often = replace(JOB, restarts=3)
    requeued = slurm_says(often)
    assert "restarted 3 times" in ask(tmp_path, "SIGTERM", job=often, **{"slurm.max_restarts": 3})
    assert requeued == []


def test_preemption_is_in_the_event_log_whoever_sends_the_job_back(tmp_path, slurm_says):
    slurm_says(replace(JOB, is_preempted=True))
    assert ask(tmp_path, "SIGUSR1") == ""
    slurm_says(replace(JOB, state="PENDING"))
    assert "already requeued" in ask(tmp_path, "SIGTERM")
    events = [event["event"] for event in json_lines.read(RunPaths(tmp_path).events)]
    assert events == ["preempted", "requeue", "preempted"]


def test_hosts_are_picked_in_the_jobs_order():
    placement = Placement(("n1", "n2", "n3"), JOB)
    assert requeue.pick_hosts(placement, 2).hosts == ("n1", "n2")
    assert requeue.pick_hosts(placement, 2, avoid=["n1"]).hosts == ("n2", "n3")
    assert requeue.pick_hosts(placement, 3, avoid=["n1"]).hosts == ("n1", "n2", "n3")


@pytest.mark.parametrize(("preempted", "sent"), [(True, ["42"]), (False, [])])
def test_error_before_training_sends_only_a_preempted_job_back(
    monkeypatch, slurm_says, preempted, sent
):
    requeued = slurm_says(JOB)
    monkeypatch.setattr(slurm, "this_job", lambda: replace(JOB, is_preempted=preempted))

    def step():
        raise UnfitError("no answer")

    with pytest.raises(UnfitError, match="no answer"):
        requeue.before_training(load_machine(None), step)
    assert requeued == sent


@pytest.mark.parametrize(("times", "ends_well"), [(1, True), (requeue.MAX_SUSPENSIONS + 1, False)])
def test_step_that_failed_while_its_job_was_suspended_is_run_again(
    monkeypatch, capsys, times, ends_well
):
    begun = []
    monkeypatch.setattr(slurm, "this_job", lambda: replace(JOB, suspended=str(len(begun))))

    def step():
        begun.append(1)
        if len(begun) <= times:
            raise UnfitError("no answer from n2")

    with contextlib.nullcontext() if ends_well else pytest.raises(UnfitError):
        requeue.before_training(load_machine(None), step)
    assert "says nothing: no answer from n2" in capsys.readouterr().err


def test_requeued_job_keeps_off_unhealthy_nodes_and_those_it_excluded_before(
    tmp_path, slurm_says, monkeypatch, capsys
):
    slurm_says(replace(JOB, excluded=("n9",)))
    RunPaths(tmp_path).bad_nodes.write_text(
        "n2   # GPU fault\nn3   # 2020-01-01T00:00:00 GPU fault\n"
    )
    asked = []
    monkeypatch.setattr(slurm, "exclude", lambda *call: asked.append(call) or "not allowed")
    assert ask(tmp_path, "peer lost") == ""
    assert set(map(str, asked)) == {"('42', ['n2', 'n9'])"}
    assert "job 42 may get n2 again: not allowed" in capsys.readouterr().err


def test_requeued_job_takes_again_the_nodes_that_forge_no_longer_excludes(
    tmp_path, slurm_says, monkeypatch, capsys
):
    slurm_says(replace(JOB, excluded=("n1", "n3", "n5", "n9")))
    RunPaths(tmp_path).bad_nodes.write_text(
        "n2   # GPU fault\nn3   # 2020-01-01T00:00:00 GPU fault\n# tried again: n1 n5\n"
    )
    asked = []
    monkeypatch.setattr(slurm, "exclude", lambda *call: asked.append(call) or "")
    assert ask(tmp_path, "peer lost", **{"slurm.exclude": ["n[5-6]"]}) == ""
    assert asked == [("42", ["n2", "n5", "n9"])]
