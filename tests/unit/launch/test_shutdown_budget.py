"""A stop that will not fit into its time is told before it is needed; a deadline is met."""

import re
import time

import pytest
from support import happenings

from forge.core import events
from forge.core.machine import load_machine
from forge.core.paths import RunPaths
from forge.core.process import Process
from forge.launch import shutdown_budget
from forge.launch.rank_records import LaunchSpec, TrainTask
from forge.launch.shutdown_budget import ShutdownBudget
from forge.slurm import slurm


def measured(step=1.0, save=20.0, **facts):
    found = ShutdownBudget({"stop_grace_sec": 60.0, "slurm.warn_sec": 30.0}, **facts)
    found.measure_step(step)
    found.saves.own.append(happenings.save(seconds=save))
    return found


def test_a_stop_needs_the_step_and_the_save_and_the_one_under_way():
    assert measured().needed == pytest.approx(
        21 * shutdown_budget.MARGIN + shutdown_budget.MARGIN_SEC
    )
    assert measured(in_flight=True).needed == pytest.approx(
        41 * shutdown_budget.MARGIN + shutdown_budget.MARGIN_SEC
    )


def test_slowest_step_and_save_count():
    found = measured()
    found.measure_step(0.1)
    found.saves.own.append(happenings.save(seconds=2.0))
    assert found.needed == measured().needed


def test_what_fits_is_not_warned_of():
    assert measured(save=10.0).warning() == ""


def test_nothing_is_said_before_a_save_was_measured():
    assert ShutdownBudget({"stop_grace_sec": 1.0}).warning() == ""


def test_warning_names_need_window_and_the_settings_that_help():
    told = measured(save=40.0).warning()
    assert "slurm.warn_sec gives 30 s" in told and "stop_grace_sec" not in told
    wanted = int(re.search(r"set slurm.warn_sec to (\d+)", told)[1])
    assert wanted >= measured(save=40.0).needed
    assert "train.checkpoint_minutes: auto" in told


def test_the_same_need_is_reported_once_and_a_greater_one_again():
    found = measured(save=40.0)
    assert found.warning() and not found.warning()
    found.saves.own.append(happenings.save(seconds=90.0))
    told = found.warning()
    assert "stop_grace_sec gives 60 s, slurm.warn_sec gives 30 s" in told


def spec_of(run, nodes=1, **task):
    values = {"step": 0, "started": time.time(), "staged": {}, "shared": "", "deadline": None}
    return LaunchSpec(
        **{"task": TrainTask(**{**values, **task}), "run": str(run), "launch": "", "job": "42"},
        **{"machine": load_machine(None), "nodes": nodes, "ranks_per_node": 1},
        launcher=Process.current(),
    )


def test_the_first_save_of_a_run_is_guessed_from_the_size_of_the_model_and_the_nodes(tmp_path):
    def needed(num_weights, nodes):
        return ShutdownBudget.of(spec_of(tmp_path, nodes), num_weights).needed

    assert needed(10**6, 1) < 15
    assert 120 < needed(10**9, 1) < 200
    # 70B on 32 nodes: five minutes, where one node would take 2.5 hours.
    assert 250 < needed(70 * 10**9, 32) < 330


def test_the_first_save_is_expected_at_half_the_rate_that_preflight_has_measured(tmp_path):
    def needed():
        return ShutdownBudget.of(spec_of(tmp_path), 10**9).needed

    unmeasured = needed()
    events.record(RunPaths(tmp_path).events, happenings.preflight(bytes_per_sec=None))
    assert needed() == unmeasured
    events.record(RunPaths(tmp_path).events, happenings.preflight(bytes_per_sec=2e9))
    assert needed() == pytest.approx((5 + 12) * 1.1 + 5)


def test_a_launch_expects_saves_as_slow_as_the_last_ones_of_the_run(tmp_path):
    for seconds in (900.0, 30.0, 60.0, 40.0):
        save = events.Save(step=1, seconds=seconds, stall=0.1, bytes=10**9)
        events.record(RunPaths(tmp_path).events, save)
    needed = ShutdownBudget.of(spec_of(tmp_path), 70 * 10**9).needed
    assert needed == pytest.approx(60 * shutdown_budget.MARGIN + shutdown_budget.MARGIN_SEC)


def test_an_evaluation_may_come_before_the_stop():
    found = measured()
    found.measure_evaluation(240.0)
    assert found.needed == pytest.approx(261 * shutdown_budget.MARGIN + shutdown_budget.MARGIN_SEC)
    assert "an evaluation of 240.0 s" in found.warning()


def test_stop_is_due_when_what_is_left_is_just_enough():
    assert not measured(deadline=time.time() + 100).is_due()
    assert measured(deadline=time.time() + 20).is_due()
    assert not measured().is_due()


def test_deadline_that_was_put_off_is_asked_for_before_training_stops():
    answers = [time.time() + 1000]
    found = measured(deadline=time.time() + 20, read_deadline=answers.pop)
    assert not found.is_due()
    assert answers == []
    assert not found.is_due()  # and not asked again before it is near


def test_a_limit_of_ones_own_holds_though_the_job_may_continue(tmp_path, monkeypatch):
    now = time.time()
    job = slurm.Job("42", "RUNNING", 0, ("n1",), 1, "gpu", "x", True, now + 10_000)
    monkeypatch.setattr(slurm, "show_job", lambda *_, **__: job)
    spec = spec_of(tmp_path, deadline=now + 3, own_deadline=now + 3)
    assert ShutdownBudget.of(spec, 10).is_due()
    spec = spec.model_copy(update={"task": spec.task.model_copy(update={"own_deadline": None})})
    assert not ShutdownBudget.of(spec, 10).is_due()
