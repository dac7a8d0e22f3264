"""Threat: after restarts the metrics hold steps twice; a page that mixes both is wrong."""

from __future__ import annotations

from pathlib import Path

from support import happenings
from support.recorded_run import RecordedRun, interrupted_run

from forge.core.paths import RunPaths
from forge.plugins.pages.curves import read_curves


def test_each_step_is_on_the_curve_once_and_lost_work_is_not(tmp_path: Path) -> None:
    train = read_curves(interrupted_run(tmp_path).paths).train
    assert list(train["step"]) == list(range(5, 201, 5))
    assert set(train["launch"][train["step"] <= 50]) == {"launch-1"}
    assert set(train["launch"][train["step"] > 50]) == {"launch-2"}


def test_later_line_for_a_step_wins(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.launch(0)
    run.metric("train", 5, loss=8.0)
    run.metric("eval", 0, loss=9.0)
    run.launch(0)
    run.metric("eval", 0, loss=9.5)
    run.metric("train", 5, loss=7.0)
    curves = read_curves(run.paths)
    assert curves.train["loss"].tolist() == [7.0]
    assert curves.evals["loss"].tolist() == [9.5]


def test_lost_points_beyond_the_newest_step_are_dropped(tmp_path: Path) -> None:
    """The relaunch has not come as far as the work that was lost."""
    run = RecordedRun(tmp_path)
    run.launch(0)
    run.steps(1, 50)
    run.save(50)
    run.steps(51, 90)
    run.launch(50)
    run.steps(51, 60)
    assert read_curves(run.paths).train["step"].max() == 60


def test_restarts_tell_step_time_and_cause(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.launch(0)
    run.steps(1, 20)
    run.save(20)
    run.event(happenings.stop("time limit", 20))
    run.launch(20)
    run.steps(21, 25)
    run.event(happenings.lost())
    run.launch(20)
    restarts = read_curves(run.paths).restarts
    assert [(r.step, r.cause) for r in restarts] == [
        (20, "stopped: time limit"),
        (20, "cut off: lost a rank: rank 1 is gone"),
    ]
    assert restarts[0].time < restarts[1].time


def test_metrics_alone_still_give_the_surviving_curve(tmp_path: Path) -> None:
    run = interrupted_run(tmp_path)
    whole = read_curves(run.paths).train
    run.paths.events.unlink()
    assert read_curves(run.paths).train["step"].tolist() == whole["step"].tolist()


def test_loss_that_was_not_finite_is_a_gap(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.launch(0)
    run.metric("train", 5, loss=8.0)
    run.metric("train", 10, loss=None)
    assert read_curves(run.paths).train["loss"].isna().tolist() == [False, True]


def test_curve_still_shows_how_a_failed_launch_went_wrong(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.launch(0)
    run.steps(1, 20)
    run.save(20)
    run.steps(21, 30)
    run.event(happenings.failed("loss is inf"))
    assert read_curves(run.paths).train["step"].max() == 30


def test_launch_that_never_got_ready_takes_no_point_and_is_no_restart(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.launch(0)
    run.steps(1, 10)
    run.save(10)
    run.event(happenings.stop("STOP file", 10))
    run.launches += 1
    run.event(happenings.launch(launch=run.id))
    run.event(happenings.failed("port taken", code=69, rank=0), after=7)
    curves = read_curves(run.paths)
    assert curves.train["step"].max() == 10 and curves.restarts == []


def test_cut_lines_change_no_curve(tmp_path: Path) -> None:
    run = interrupted_run(tmp_path)
    before = read_curves(run.paths).train
    with run.paths.metrics.open("a") as file:
        file.write('{"time": 1, "kind": "gpu", "watts": 300}\n{"time": 1, "kind": "tr')
    assert read_curves(run.paths).train.equals(before)


def test_folder_without_an_event_log_has_empty_curves(tmp_path: Path) -> None:
    curves = read_curves(RunPaths(tmp_path))
    assert (len(curves.train), len(curves.evals), curves.restarts) == (0, 0, [])
