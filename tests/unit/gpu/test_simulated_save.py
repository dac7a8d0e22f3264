"""Against an asynchronous save that copies numbers of two steps, or stops the training beside it."""

import pytest

pytestmark = pytest.mark.all


@pytest.mark.parametrize("train", [{"shard": "none"}, {"shard": "all"}, {"optimizer": "muon"}])
def test_state_is_copied_beside_a_step_without_a_race_or_a_wait(simulate, train):
    without = simulate(train=train)
    step = simulate(train=train, saves=True)
    assert (step.races, step.wrong_devices) == ([], [])
    assert step.waits == without.waits
    assert step.event_waits == without.event_waits + 1  # the writer thread's own
    assert step.pinned_copies > without.pinned_copies
