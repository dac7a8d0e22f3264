"""Against points that are doubled, lost or mixed up: rows are the same whenever somebody reads them."""

from __future__ import annotations

import pytest
from support import happenings
from support.recorded_run import RecordedRun

from forge.core import events
from forge.core.paths import RunPaths
from forge.plugins.tracking.rows import Rows
from forge.trainer import metrics
from forge.trainer.metrics import EvalLine, StepLine, TrainLine


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path)


def train(paths, step, launch="a", **numbers):
    usual = {"loss": 4.0, "grad_norm": 1.0, "lr": 1e-3, "tokens_per_sec": 100.0, "mfu": None}
    metrics.write(
        paths.metrics, TrainLine(launch=launch, step=step, **{**usual, "tokens": step, **numbers})
    )


def steps(rows):
    return [row.step for row in rows]


def test_row_is_complete_when_a_later_step_follows_or_training_is_over(paths):
    rows = Rows(paths)
    assert steps(rows.new()) == []  # no files yet
    train(paths, 1, loss=3.0)
    assert steps(rows.new()) == []
    metrics.write(paths.metrics, EvalLine(launch="a", step=1, loss=3.5))
    train(paths, 2)
    [first] = rows.new()
    assert (first.step, first.values["train/loss"], first.values["val/loss"]) == (1, 3.0, 3.5)
    assert steps(rows.new(is_over=True)) == [2]
    assert steps(rows.new(is_over=True)) == []


def test_validation_loss_of_each_source_is_a_number_of_its_own(paths):
    sources = {"code": 2.5, "docs": 4.5}
    metrics.write(paths.metrics, EvalLine(launch="a", step=1, loss=3.5, sources=sources))
    metrics.write(paths.metrics, EvalLine(launch="a", step=2, loss=3.4, bpb=1.25))
    assert "sources" not in paths.metrics.read_text().splitlines()[1]
    first, second = Rows(paths).new(is_over=True)
    assert first.values == {"val/loss": 3.5, "val/loss/code": 2.5, "val/loss/docs": 4.5}
    assert second.values == {"val/loss": 3.4, "val/bits_per_byte": 1.25}


def test_half_written_last_line_is_read_when_it_is_complete(paths):
    rows = Rows(paths)
    train(paths, 1)
    train(paths, 2)
    text = paths.metrics.read_text()
    paths.metrics.write_text(text[:-9])
    assert steps(rows.new()) == []
    paths.metrics.write_text(text)
    assert steps(rows.new(is_over=True)) == [1, 2]


def test_steps_that_a_resumed_launch_repeats_come_once(paths):
    for time, launch, numbers in ((100.0, "a", range(1, 6)), (200.0, "b", range(3, 8))):
        begun = happenings.launch(numbers[0] - 1, launch=launch, time=time)
        events.record(paths.events, begun)
        for step in numbers:
            train(paths, step, launch, time=time + step)
    events.record(paths.events, happenings.completed(7))
    found = list(Rows(paths).new(is_over=True))
    assert steps(found) == [1, 2, 3, 4, 5, 6, 7]
    restarts = {
        row.step: row.values["run/launches"] for row in found if "run/launches" in row.values
    }
    assert restarts == {1: 1, 6: 2}


@pytest.mark.parametrize(
    "ends",
    [
        [],
        [happenings.lost("rank 1: killed")],
        [happenings.lost("rank 1: killed"), happenings.failed("rank 1", diverged=False)],
    ],
)
def test_validation_loss_of_a_step_reaches_trackers_if_the_launch_was_killed_before_it(paths, ends):
    """Killed in the evaluation of step 4, resumed from step 2; the sender of each launch ends with it."""
    events.record(paths.events, happenings.launch(0, launch="a", time=100.0))
    for step in (1, 2, 3, 4):
        train(paths, step, "a", time=100.0 + step)
    for event in ends:
        events.record(paths.events, event.model_copy(update={"time": 110.0}))
    before = list(Rows(paths).new(is_over=True))
    assert steps(before) == [1, 2, 3]

    events.record(paths.events, happenings.launch(2, launch="b", time=200.0))
    for step in (3, 4):
        train(paths, step, "b", time=200.0 + step, loss=9.0)
    metrics.write(paths.metrics, EvalLine(launch="b", step=4, loss=3.5, time=204.5))
    train(paths, 5, "b", time=205.0)
    completed = happenings.completed(5).model_copy(update={"time": 206.0})
    events.record(paths.events, completed)
    *same, fourth, fifth = Rows(paths).new(is_over=True)
    assert same == before
    assert (fourth.step, fourth.values["train/loss"], fourth.values["val/loss"]) == (4, 4.0, 3.5)
    assert (fifth.step, fifth.values["run/launches"]) == (5, 2.0)


def test_reader_that_begins_later_gets_the_same_rows(tmp_path):
    run = RecordedRun(tmp_path / "run")
    early, seen = Rows(run.paths), []
    run.launch(0)
    for step in (1, 2, 3):
        run.time += 1
        metrics.write(
            run.paths.metrics,
            TrainLine(
                **{"time": run.time, "launch": run.id, "step": step, "loss": 1.0, "grad_norm": 1.0},
                **{"lr": 1e-3, "tokens_per_sec": 9.0, "mfu": 0.5, "tokens": step},
            ),
        )
        run.event(happenings.save(step))
        seen += early.new()
    run.event(happenings.completed(3))
    seen += early.new(is_over=True)
    assert seen == list(Rows(run.paths).new(is_over=True))
    assert [row.values["checkpoint/step"] for row in seen] == [1, 2, 3]


def test_numbers_that_were_not_finite_are_left_out(paths):
    train(paths, 1, loss=float("nan"))
    [row] = Rows(paths).new(is_over=True)
    assert "train/loss" not in row.values and row.values["train/grad_norm"] == 1.0


def test_program_that_tells_steps_only_has_these(paths):
    metrics.write(paths.metrics, StepLine(launch="a", step=7))
    [row] = Rows(paths).new(is_over=True)
    assert row.values == {"train/step": 7.0}


@pytest.mark.parametrize(
    ("last", "state"),
    [
        (happenings.completed(4), "completed"),
        (happenings.stop("SIGTERM"), "stopped: SIGTERM"),
        (happenings.failed("loss nan"), "failed: loss nan"),
        (happenings.requeue("SIGUSR1"), "requeued: SIGUSR1"),
        (happenings.lost("rank 1 is gone"), "cut off: rank 1 is gone"),
        (happenings.launch(), "running"),
    ],
)
def test_state_is_that_of_the_last_event_that_tells_one(paths, last, state):
    for time, event in enumerate((happenings.stop("STOP file"), last, happenings.save())):
        events.record(paths.events, event.model_copy(update={"time": float(time)}))
    rows = Rows(paths)
    list(rows.new())
    assert rows.state == state
