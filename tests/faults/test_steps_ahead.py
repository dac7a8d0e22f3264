"""Against a run on GPUs that differs from one on CPUs: there the host launches a step before it has read
the results of the one before. Here the same loop runs so on CPUs.
"""

from __future__ import annotations

import pytest
from injection import Fault
from plans import Plan
from runs import GOAL, INTERVAL
from support.saved import state_of

from forge.checkpoint import resume
from forge.core.errors import Exit

AHEAD = Plan(ahead=True)
BAD_STEP = 3 * INTERVAL


@pytest.mark.parametrize("ranks", [1, 2])
def test_run_whose_results_are_read_late_is_bitwise_the_same(ranks, runs, uninterrupted):
    run = runs(f"late-{ranks}", ranks, "--train.log_every=1")
    ended = run.train(plan=AHEAD)
    assert ended.code == Exit.DONE, ended.text
    assert run.story() == uninterrupted(ranks)
    assert [step for step, _ in run.losses()] == list(range(1, GOAL + 1))


def test_stop_is_agreed_a_step_later_and_resumes_bitwise_equal(runs, uninterrupted):
    run = runs("late-stop", 2)
    ended = run.train(plan=Plan((Fault("term", "data.read", at=6, rank=1),), ahead=True))
    assert ended.code == Exit.STOPPED, ended.text
    assert [event["step"] for event in run.events("stop")] == [7]
    assert resume.latest(run.paths).step == 7
    assert run.train(plan=AHEAD).code == Exit.DONE
    assert run.story() == uninterrupted(2)
    assert run.steps_lost() == 0


def test_numbers_that_are_not_finite_are_never_committed(runs):
    run = runs("late-nan", 2)
    ended = run.train(plan=Plan(poison="nan-gradient", poison_step=BAD_STEP, ahead=True))
    assert ended.code == Exit.FAILED, ended.text
    assert f"step {BAD_STEP}: loss" in ended.text and "are not finite" in ended.text
    assert resume.latest(run.paths).step == BAD_STEP - INTERVAL


@pytest.mark.parametrize("shard", ["none", "all"])
def test_skipped_update_is_counted_in_the_checkpoint_of_its_step_and_changes_nothing(shard, runs):
    """A checkpoint that is due after a bad step must know of it, though the step is read late."""
    run = runs(f"late-skip-{shard}", 2, f"--train.shard={shard}", "--train.on_nonfinite=skip")
    plan = Plan(poison="nan-gradient", poison_step=BAD_STEP, ahead=True)
    for step in (BAD_STEP - 1, BAD_STEP):
        ended = run.train(plan=plan, more=(f"--train.max_steps={step}",))
        assert ended.code == Exit.DONE, ended.text
    found = resume.latest(run.paths)
    assert (found.step, found.manifest.skipped.steps) == (BAD_STEP, 1)
    after = state_of(found.folder)
    before = state_of(run.paths.checkpoints / f"step-{BAD_STEP - 1:08d}")
    assert before.keys() == after.keys()
    assert all(before[name].equal(after[name]) for name in before)
