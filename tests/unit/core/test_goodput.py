"""The model of goodput: figures known from elsewhere, its optimum, and a simulation of the same run."""

import math
import random

import pytest
from support import happenings

from forge.core.goodput import Interruptions, SaveTimes, best_interval, ettr

HOUR = 3600.0


@pytest.mark.parametrize(("hours", "share"), [(1, 0.964), (3, 0.986), (12, 0.996)])
def test_ettr_at_the_best_interval(hours, share):
    events = {"stall": 0.5, "between_events": hours * HOUR, "saved_share": 0.8}
    at_best = ettr(best_interval(**events), restart=90, detection=60, **events)
    assert at_best == pytest.approx(share, abs=0.0006)


@pytest.mark.parametrize(("hours", "share"), [(1, 0.64), (3, 0.88), (12, 0.97)])
def test_ettr_of_half_an_hour_between_saves_and_no_notice(hours, share):
    value = ettr(
        1800, stall=0.5, restart=90, detection=300, between_events=hours * HOUR, saved_share=0
    )
    assert value == pytest.approx(share, abs=0.005)


def test_ettr_of_an_event_every_five_minutes():
    value = ettr(30, stall=0.5, restart=25, detection=5, between_events=300, saved_share=0.8)
    assert value == pytest.approx(0.89, abs=0.005)


@pytest.mark.parametrize(("interval", "share"), [(30, 0.86), (150, 0.67)])
def test_ettr_of_an_event_every_five_minutes_and_no_notice(interval, share):
    value = ettr(interval, stall=0, restart=25, detection=0, between_events=300, saved_share=0)
    assert value == pytest.approx(share, abs=0.01)


def test_ettr_without_events_lacks_the_stalls_only():
    value = ettr(90, stall=10, restart=60, detection=60, between_events=math.inf, saved_share=0)
    assert value == 0.9


def test_ettr_is_never_negative():
    assert ettr(60, stall=1, restart=600, detection=0, between_events=300, saved_share=1) == 0


def test_best_interval_is_infinite_where_no_event_costs_steps():
    assert best_interval(stall=1, between_events=HOUR, saved_share=1) == math.inf
    assert best_interval(stall=1, between_events=math.inf) == math.inf


@pytest.mark.parametrize("saved_share", [0, 0.5, 0.8])
def test_no_other_interval_gives_a_higher_ettr(saved_share):
    events = {"stall": 2.0, "between_events": 3 * HOUR, "saved_share": saved_share}
    best = best_interval(**events)
    at_best = ettr(best, restart=60, detection=30, **events)
    others = [ettr(best * x, restart=60, detection=30, **events) for x in (0.5, 0.8, 1.25, 2)]
    assert max(others) < at_best


def simulated(*, interval, stall, restart, detection, between_events, saved_share):
    """Share of the wall time in steps that count, of a run with 20,000 random events."""
    random_numbers = random.Random(7)
    wall = kept = 0.0
    for _ in range(20_000):
        trained = random_numbers.expovariate(1 / (between_events - restart))
        saves = trained // (interval + stall)
        if random_numbers.random() < saved_share:  # a last save, whose stall counts as restart
            kept += trained - saves * stall
        else:
            kept += saves * interval
            wall += detection
        wall += trained + restart
    return kept / wall


@pytest.mark.parametrize("saved_share", [0, 0.8])
@pytest.mark.parametrize("interval", [60, 300])
def test_ettr_agrees_with_a_simulated_run(interval, saved_share):
    facts = {"stall": 2.0, "restart": 60, "detection": 30, "between_events": 2 * HOUR}
    simulation = simulated(interval=interval, saved_share=saved_share, **facts)
    assert ettr(interval, saved_share=saved_share, **facts) == pytest.approx(simulation, abs=0.003)


# --- what is known of interruptions ---------------------------------------------------------------


def test_mean_between_events_is_the_one_seen_or_the_cautious_one_if_that_is_shorter():
    day = 24 * HOUR
    assert Interruptions().between_events == day
    assert Interruptions(seconds=9 * day).between_events == 10 * day
    assert Interruptions(number=100, seconds=9 * HOUR).between_events == HOUR / 10
    assert Interruptions(number=1, seconds=9 * day).between_events == 5 * day


def test_minutes_of_a_toy_run_that_was_killed_do_not_say_that_no_run_ever_ends():
    killed = Interruptions(number=1, seconds=20, not_saved=1)
    assert killed.between_events == HOUR + 20
    assert killed.ettr(600, 5) > 0.85


def test_share_of_saved_events_is_never_all_of_them():
    assert Interruptions().saved_share == 0
    assert Interruptions(number=9, saved=9).saved_share == 0.9


def test_forecast_counts_the_time_down_between_events():
    """Launches of 300 s, 100 s down each: of 400 s, 300 are of use, saves before each event."""
    known = Interruptions(number=10**6, seconds=3e8, saved=10**6, restart=100)
    assert known.ettr(30, 0) == pytest.approx(0.75, abs=0.001)


# --- what saves cost ------------------------------------------------------------------------------


def test_saves_cost_what_the_last_ones_did_and_those_of_this_launch_count_alone():
    saves = SaveTimes([happenings.save(seconds=2.0, stall=stall) for stall in (9, 0.4, 0.6, 0.5)])
    assert (saves.cost, saves.slowest, bool(saves.own)) == ((0.5, 2.0), 2.0, False)
    for seconds in (90.0, 30.0, 30.0, 30.0):
        saves.own.append(happenings.save(seconds=seconds, stall=3.0))
    assert (saves.cost, saves.slowest, bool(saves.own)) == ((3.0, 30.0), 90.0, True)
    assert SaveTimes([happenings.launch()]).cost is None


@pytest.mark.parametrize("stall", [float("nan"), float("inf"), -1.0])
def test_save_with_an_impossible_stall_is_left_out(stall):
    assert SaveTimes([happenings.save(seconds=2.0, stall=stall)]).cost is None
