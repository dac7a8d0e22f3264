"""Against a hung rank that looks alive because one of its other threads works, and a slow one that looks
hung."""

import threading

import pytest

from forge.launch import heartbeat
from forge.launch.heartbeat import Activity, Heartbeat


class Clock:
    """Seconds that pass when the test says so."""

    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def beats(clock):
    return Heartbeat(clock)


def test_activity_is_the_phase_and_its_seconds(beats, clock):
    beats.begin_step(8)
    clock.now += 2
    assert beats.activity == Activity(8, "data read of step 8", waits=False, sec=2, stalled=False)
    beats.beat("losses of step 8", waits=True)
    clock.now += 3
    assert beats.activity == Activity(8, "losses of step 8", waits=True, sec=3, stalled=False)
    assert beats.activity.where == "in the losses of step 8 for 3 s"


def test_work_beside_the_main_thread_is_no_progress(beats, clock):
    beats.beat("losses of step 8", waits=True)
    clock.now += 9
    writer = threading.Thread(target=beats.beat, args=("commit",))
    writer.start()
    writer.join()
    assert (beats.activity.phase, beats.activity.sec) == ("losses of step 8", 9)


def test_limit_follows_the_slowest_step_up_to_half_the_timeout(beats, clock):
    assert beats.limit_sec == heartbeat.SHORTEST_STALL_SEC
    for step, seconds in enumerate((7, 2, 1), 1):
        beats.begin_step(step)
        clock.now += seconds
    beats.begin_step(4)
    assert beats.limit_sec == heartbeat.SLOWEST_STEPS * 7
    beats.timeout_sec = 50
    assert beats.limit_sec == 25
    clock.now += 24
    assert not beats.activity.stalled
    clock.now += 1
    assert beats.activity.stalled
