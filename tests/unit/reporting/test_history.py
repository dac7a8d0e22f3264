"""Threat: after restarts the event log holds steps twice; a wall time that counts both is wrong."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from support import happenings
from support.recorded_run import START, STEP_SEC, RecordedRun, interrupted_run

from forge.core import events
from forge.core.paths import RunPaths
from forge.reporting.history import PHASES, read_history


def test_phases_account_for_every_second_once(tmp_path: Path) -> None:
    run = interrupted_run(tmp_path)
    history = read_history(run.paths)
    assert all(before.end == after.start for before, after in pairwise(history.phases))
    assert history.phases[0].start == START
    assert history.phases[-1].end == run.time
    assert set(history.seconds) <= set(PHASES)
    assert history.seconds == pytest.approx(
        {
            "train": 200 * STEP_SEC + 0.2,
            "eval": 5.0,
            "save": 2.0,
            "init": 8.0,
            "stage": 2.1,
            "preflight": 6.0,
            "validate": 6.0,
            "recomputed": 30 * STEP_SEC,  # up to step 80, the last sign of life
            "waiting": 34.0,
        }
    )
    assert history.goodput == pytest.approx(100.2 / history.wall_sec)


def test_cut_off_launch_ends_at_its_last_sign_of_life(tmp_path: Path) -> None:
    first, second = read_history(interrupted_run(tmp_path).paths).launches
    assert (first.outcome, first.last_step) == ("cut off", 80)
    assert first.end == first.metrics[-1].time < second.start
    assert (second.outcome, second.resumed_step, second.last_step) == ("completed", 50, 200)


def test_stop_that_saved_loses_nothing(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.launch(0)
    run.steps(1, 33)
    run.save(33)  # between two metrics lines
    run.event(happenings.stop("SIGTERM", 33))
    run.launch(33)
    run.steps(34, 40)
    history = read_history(run.paths)
    assert "recomputed" not in history.seconds
    assert history.seconds["train"] == pytest.approx(40 * STEP_SEC)


def test_steps_after_the_last_save_of_a_failed_launch_are_lost(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.launch(0)
    run.steps(1, 20)
    run.save(20)
    run.steps(21, 30)
    run.event(happenings.failed("loss is inf"))
    history = read_history(run.paths)
    assert history.seconds["recomputed"] == pytest.approx(10 * STEP_SEC)
    assert history.seconds["train"] == pytest.approx(20 * STEP_SEC)
    assert history.launches[-1].outcome == "failed: rank 1: loss is inf"


def test_launch_that_never_got_ready_undoes_nothing(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.launch(0)
    run.steps(1, 10)
    run.save(10)
    run.event(happenings.stop("STOP file", 10))
    run.launches += 1
    run.event(happenings.launch(launch=run.id))
    run.event(happenings.failed("port taken", code=69, rank=0), after=7)
    history = read_history(run.paths)
    assert history.seconds["init"] == pytest.approx(4 + 7)


def test_time_between_a_finished_run_and_more_steps_is_not_wall_time(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.launch(0)
    run.steps(1, 10)
    run.save(10)
    run.complete(10)
    run.validate(10)
    before = read_history(run.paths).wall_sec
    run.time += 30 * 86400  # a month later somebody raises max_steps
    run.event(happenings.stage(seconds=1.0))
    assert read_history(run.paths).wall_sec == pytest.approx(before + 1.0)


def test_cut_lines_and_edited_events_are_ignored(tmp_path: Path) -> None:
    run = interrupted_run(tmp_path)
    before = read_history(run.paths)
    with run.paths.events.open("a") as file:
        file.write(
            json.dumps({"time": run.time + 99, "event": "lunch", "format": events.FORMAT}) + "\n"
        )
        file.write('{"time": 1, "event": "sto')
    with run.paths.metrics.open("a") as file:
        file.write(json.dumps({"time": run.time + 99, "kind": "gpu", "watts": 300}) + "\n")
        file.write('{"time": 1, "kind": "tr')
    after = read_history(run.paths)
    assert after.phases == before.phases


def test_folder_without_an_event_log_gives_an_empty_history(tmp_path: Path) -> None:
    history = read_history(RunPaths(tmp_path))
    assert (history.launches, history.phases) == ([], [])
    assert (history.wall_sec, history.goodput) == (0, None)
