"""Checkpoints are due by the clock: at a fixed interval, or at the best one for what saves cost here."""

import math

import pytest
from support import happenings

from forge.core.goodput import Interruptions, SaveTimes, best_interval
from forge.trainer.save_clock import FIRST_SEC, SaveClock, told

DAY = 24 * 3600.0
EVERY_TEN_MINUTES = Interruptions(number=12, seconds=3600, saved=6, not_saved=6)


class Clock:
    """Time that a test sets."""

    now = 1000.0

    def __call__(self):
        return self.now


def save_clock(minutes, known, clock, saves=None):
    return SaveClock(minutes, known, saves or SaveTimes(), clock)


def measure(saves, stall, seconds):
    saves._saves.own.append(happenings.save(stall=stall, seconds=seconds))


@pytest.fixture
def clock():
    return Clock()


def test_no_checkpoint_is_due_by_the_clock_without_minutes(clock):
    saves = save_clock(None, Interruptions(), clock)
    clock.now += 10 * DAY
    assert not saves.is_due()
    assert saves.changed(1) is None


def test_checkpoint_is_due_when_the_minutes_have_passed_since_the_last(clock):
    saves = save_clock(0.5, Interruptions(), clock)
    clock.now += 29
    assert not saves.is_due()
    clock.now += 2
    assert saves.is_due()
    saves.begin()
    assert not saves.is_due()
    measure(saves, 10, 20)
    assert (saves.interval, saves.changed(1)) == (30, None)


def test_first_checkpoint_of_an_automatic_interval_comes_after_a_minute(clock):
    saves = save_clock("auto", Interruptions(), clock)
    assert saves.interval == FIRST_SEC
    assert saves.changed(0) is None
    clock.now += FIRST_SEC + 1
    assert saves.is_due()


def test_automatic_interval_is_youngs_of_the_measured_stall(clock):
    saves = save_clock("auto", EVERY_TEN_MINUTES, clock)
    measure(saves, 0.5, 2.0)
    expected = best_interval(stall=0.5, between_events=600, saved_share=6 / 13)
    assert saves.interval == pytest.approx(expected)


def test_stall_of_earlier_launches_counts_until_one_is_measured(clock):
    earlier = SaveTimes([happenings.save(stall=2.0, seconds=4.0)])
    saves = save_clock("auto", EVERY_TEN_MINUTES, clock, earlier)
    before = saves.interval
    assert before == pytest.approx(
        best_interval(stall=2, between_events=600, saved_share=6 / 13), rel=1e-6
    )
    measure(saves, 0.5, 2.0)
    assert saves.interval == pytest.approx(before / 2)


def test_interrupted_history_makes_checkpoints_more_frequent(clock):
    calm = save_clock("auto", Interruptions(), clock)
    stormy = save_clock("auto", EVERY_TEN_MINUTES, clock)
    for saves in (calm, stormy):
        measure(saves, 0.5, 2.0)
    assert stormy.interval < calm.interval / 5


def test_interval_grows_while_nothing_happens(clock):
    saves = save_clock("auto", EVERY_TEN_MINUTES, clock)
    measure(saves, 0.5, 2.0)
    before = saves.interval
    clock.now += 3 * 7200
    assert saves.interval == pytest.approx(2 * before)


@pytest.mark.parametrize(
    ("stall", "save", "interval"),
    [(0.0, 0.0, 10), (0.0, 40.0, 80), (60.0, 70.0, 600), (0.1, 900.0, 1800)],
)
def test_saves_leave_time_to_train(clock, stall, save, interval):
    saves = save_clock("auto", Interruptions(number=1000, seconds=1000), clock)
    measure(saves, stall, save)
    assert saves.interval == interval


def test_no_interval_is_longer_than_an_hour(clock):
    saves = save_clock("auto", Interruptions(seconds=1000 * DAY), clock)
    measure(saves, 10.0, 20.0)
    assert saves.interval == 3600


def test_interval_is_told_when_it_is_chosen_and_when_it_has_changed_by_a_quarter(clock):
    saves = save_clock("auto", EVERY_TEN_MINUTES, clock)
    measure(saves, 0.5, 2.0)
    first = saves.changed(40)
    assert first is not None
    assert (first.step, first.stall) == (40, 0.5)
    assert first.interval == pytest.approx(saves.interval, abs=0.001)
    assert 0 < first.ettr < 1
    assert saves.changed(41) is None
    clock.now += 7200 * 0.5  # the interval grows by 22 %
    assert saves.changed(50) is None
    clock.now += 7200 * 0.2
    assert saves.changed(60) is not None
    assert saves.changed(61) is None


def test_expected_goodput_is_told_again_when_it_has_changed(clock):
    earlier = SaveTimes([happenings.save(stall=0.1, seconds=0.2)])
    saves = save_clock("auto", Interruptions(number=40, seconds=400), clock, earlier)
    first = saves.changed(1)
    assert (first.interval, first.ettr < 0.5) == (10, True)
    clock.now += 12000
    later = saves.changed(2)
    assert later.interval == 10  # the least, as before
    assert later.ettr > 0.7
    assert saves.changed(3) is None


def test_what_is_told_has_the_interval_its_reason_and_the_history(clock):
    saves = save_clock("auto", EVERY_TEN_MINUTES, clock)
    measure(saves, 0.5, 2.0)
    assert told(saves.changed(40)) == (
        "a checkpoint every 33 s (train.checkpoint_minutes: auto; a save stalls training for 0.5 s;"
        " 12 interruptions in 1 h, 6 of 12 with time for a save)"
    )


def test_nothing_known_is_said_to_be_assumed():
    assert str(Interruptions()) == "no interruption known: assumes one in 24 h"
    after = Interruptions(seconds=7200)
    assert str(after) == "no interruption in 2 h: assumes one in 26 h"
    assert math.isclose(after.between_events, DAY + 7200)
