"""A forecast names what it rests on, and is none where nothing is known."""

import pytest
from support import happenings

from forge.core.goodput import STALL_SEC, Interruptions, SaveTimes
from forge.core.train_settings import Train
from forge.run.forecast import end_at, expected_by, expected_of

KNOWN = Interruptions(number=4, seconds=14400, saved=2, not_saved=2, restart=90)
SAVES = SaveTimes([happenings.save(stall=0.5, seconds=2)])


def at(time, event):
    return event.model_copy(update={"time": float(time)})


@pytest.mark.parametrize(
    ("settings", "step_sec", "interval"),
    [
        ({"checkpoint_every": 100}, 3.0, 300),
        ({"checkpoint_every": 100, "checkpoint_minutes": 2}, 3.0, 120),
        ({"checkpoint_every": 100, "checkpoint_minutes": 9}, 3.0, 300),
        ({"checkpoint_every": 100, "checkpoint_minutes": 9}, None, 540),
    ],
)
def test_forecast_is_of_the_shorter_interval(settings, step_sec, interval):
    expected = expected_of(Train(**settings), step_sec, KNOWN, SAVES)
    assert expected.interval == interval
    assert expected.ettr == KNOWN.ettr(interval, 0.5)


def test_forecast_of_an_automatic_interval_is_the_best():
    auto = expected_of(Train(checkpoint_minutes="auto"), None, KNOWN, SAVES)
    others = [expected_of(Train(checkpoint_minutes=m), None, KNOWN, SAVES) for m in (0.3, 3, 30)]
    assert auto.ettr > max(other.ettr for other in others)


def test_forecast_without_any_save_assumes_a_stall():
    assert (
        expected_of(Train(checkpoint_minutes=9), None, Interruptions(), SaveTimes()).stall
        == STALL_SEC
    )


def test_nothing_is_expected_of_saves_by_steps_of_unknown_time():
    assert expected_of(Train(), None, KNOWN, SAVES) is None


def test_run_that_saves_by_steps_is_expected_to_do_what_its_log_says():
    saves = [at(60 * n, happenings.save(seconds=1, stall=0.5)) for n in (1, 2, 3)]
    log = [at(0, happenings.launch()), *saves, at(200, happenings.lost())]
    expected = expected_by(log)
    assert (expected.interval, expected.stall) == (59.5, 0.5)
    assert "1 interruption in 3 min 20 s, 0 of 1 with time for a save" in str(expected)
    assert expected.ettr > 0.9
    assert expected_by(log[:2]) is None


@pytest.mark.parametrize(
    "ending", [happenings.stop("Ctrl-C", step=130), happenings.completed(step=130)]
)
def test_save_of_an_end_is_no_periodic_one(ending):
    """It comes at any time, such as right after the last one."""
    periodic = [at(60 * n, happenings.save(step=50 * n, seconds=0, stall=0)) for n in (1, 2)]
    final = at(120.001, happenings.save(step=130, seconds=0, stall=0))
    log = [at(0, happenings.launch()), *periodic, final, at(121, ending)]
    assert expected_by(log).interval == 60
    assert expected_by([log[0], periodic[1], *log[3:]]) is None


def test_gap_between_launches_is_no_interval():
    log = []
    for start in (0, 1000):
        saves = [at(start + 60 * n, happenings.save(seconds=0, stall=0)) for n in (1, 2)]
        log += [at(start, happenings.launch(launch=f"launch-{start}")), *saves]
    assert expected_by(log).interval == 60


def test_run_with_an_automatic_interval_says_what_it_expects_itself():
    log = [happenings.launch(), happenings.forecast(30.0), happenings.forecast(45.0, ettr=0.9)]
    assert str(expected_by(log)) == (
        "90.0% with a checkpoint every 45 s that stalls training for 0.5 s; 2 interruptions in 3 h"
    )


def test_end_is_a_date_and_a_duration():
    assert end_at(0, 90000) == "1970-01-02 01:00 UTC, in 1 d 1 h"
    assert end_at(0, 1e15) == "after the last date of the calendar"
