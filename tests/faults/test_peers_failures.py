"""Against what was seen to end training, or to spoil it, in projects that do what Forge does."""

from __future__ import annotations

import pytest
from injection import Fault
from plans import Plan
from runs import GOAL, INTERVAL

from forge.checkpoint import directory, resume
from forge.core.errors import Exit


def go_on(run, uninterrupted, ranks):
    """The same command again ends as the uninterrupted run."""
    ended = run.train()
    assert ended.code == Exit.DONE, ended.text
    assert run.story() == uninterrupted(ranks)
    run.assert_whole()
    return ended


@pytest.mark.parametrize("point", ["save.write", "commit.rename", "commit.latest"])
def test_killed_during_the_first_save_the_next_start_trains_on(point, runs, uninterrupted):
    """There every restart crashed, for ever."""
    run = runs(f"first-save-{point.replace('.', '-')}", 1)
    ended = run.train(Fault("power", point, step=INTERVAL))
    assert ended.code == -9, ended.text
    assert not run.paths.latest.exists()
    go_on(run, uninterrupted, 1)
    # With its final name the folder is committed, and the next start points `latest` to it.
    assert run.starts() == [0, INTERVAL if point == "commit.latest" else 0]


def test_killed_between_two_files_of_a_save_resumes_weights_and_step_together(runs, uninterrupted):
    """There the next start had trained weights, at step 0."""
    run = runs("between-files", 1)
    ended = run.train(Fault("power", "save.sync", at=2, step=2 * INTERVAL))
    assert ended.code == -9, ended.text
    [written] = run.paths.checkpoints.glob(f"{directory.TEMPORARY}*")
    assert len(list(written.iterdir())) >= 1
    assert resume.latest(run.paths).step == INTERVAL
    go_on(run, uninterrupted, 1)
    assert run.starts() == [0, INTERVAL]


@pytest.mark.parametrize("first", [0, 1])
def test_stop_signals_that_reach_two_ranks_apart_end_in_one_agreed_stop(first, runs, uninterrupted):
    """There they ended in mismatched collectives and an empty step folder."""
    run = runs(f"apart-{first}", 2)
    signals = (
        Fault("term", "data.read", at=7, rank=first),
        Fault("term", "data.read", at=7, rank=1 - first, after_sec=0.2),
    )
    ended = run.train(*signals)
    assert ended.code == Exit.STOPPED, ended.text
    assert len(run.strikes()) == 2
    assert [event["step"] for event in run.events("stop")] == [7]
    assert resume.latest(run.paths).step == 7
    run.assert_whole()
    go_on(run, uninterrupted, 2)
    assert run.steps_lost() == 0


@pytest.mark.parametrize(("poison", "ranks"), [("nan-gradient", 2), ("infinite-moment", 1)])
def test_numbers_that_are_not_finite_behind_a_finite_loss_are_never_committed(poison, ranks, runs):
    """There a gradient of NaN with a finite loss became `latest`, with exit 0."""
    run = runs(poison, ranks)
    bad_step = 3 * INTERVAL
    ended = run.train(plan=Plan(poison=poison, poison_step=bad_step))
    assert ended.code == Exit.FAILED, ended.text
    assert "not finite" in ended.text
    assert "Traceback" not in ended.text
    assert resume.latest(run.paths).step == bad_step - INTERVAL
    assert all(loss is not None for _, loss in run.losses())
    again = run.train()
    assert again.code == Exit.FAILED, again.text
    assert "this config failed before" in again.text


@pytest.mark.parametrize("ranks", [1, 2])
def test_second_sigterm_during_the_last_save_does_not_end_it(ranks, runs, uninterrupted):
    """There it was killed after `graceful shutdown` had been logged."""
    run = runs(f"twice-{ranks}", ranks)
    stop_at = 2 * INTERVAL + 1
    ended = run.train(
        # To the command and to all ranks, each time.
        Fault("term-all", "data.read", at=stop_at),
        Fault("term-all", "save.write", step=stop_at),
        Fault("term-all", "commit.rename", step=stop_at),
        Fault("term-all", "commit.done", step=stop_at),
    )
    assert ended.code == Exit.STOPPED, ended.text
    assert len(run.strikes()) == 4
    assert f"step {stop_at}: committed" in ended.text
    assert resume.latest(run.paths).step == stop_at
    run.assert_whole()
    go_on(run, uninterrupted, ranks)
    assert (run.steps_lost(), len(run.losses())) == (0, GOAL)


def test_starts_that_are_killed_each_time_end_at_the_gate_with_the_reasons(runs):
    """There a run that dies before its first checkpoint burns the queue."""
    run = runs("stuck", 1, "--machine.max_restarts_without_progress=3")
    for _ in range(3):
        killed = run.train(Fault("power", "save.write", step=INTERVAL))
        assert killed.code == -9, killed.text
    ended = run.train()
    assert ended.code == Exit.FAILED, ended.text
    assert "3 launches in a row did not get beyond step 0" in ended.text
    assert ended.text.count("no end is recorded") == 3
    assert len(run.starts()) == 3
