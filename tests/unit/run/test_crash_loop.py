"""Against burning the queue: starts that get nowhere are counted, a person's stops are not."""

import pytest

from forge.core import event_log
from forge.core.errors import TrainingError
from forge.run import crash_loop

LIMIT = 3


@pytest.fixture
def events(tmp_path):
    return tmp_path / "events.jsonl"


def tell(events, *happenings):
    """Each happening: the step that a start begins at, or the name of an event, or (name, facts)."""
    for number, happening in enumerate(happenings):
        if isinstance(happening, int):
            event_log.record(events, "launch", launch=f"start-{number}", step=happening)
        else:
            name, facts = (happening, {}) if isinstance(happening, str) else happening
            event_log.record(events, name, **facts)


def test_starts_at_the_same_step_end_with_the_reason_of_each(events):
    lost = ("lost", {"message": "rank 1 is gone"})
    tell(events, 0, 40, lost, 40, ("requeue", {"cause": "SIGUSR1"}), 40)
    with pytest.raises(TrainingError) as caught:
        crash_loop.refuse_if_stuck(events, 40, LIMIT)
    told = str(caught.value)
    assert "3 starts in a row did not get beyond step 40" in told
    assert [reason in told for reason in ("rank 1 is gone", "SIGUSR1", "without a word")] == [
        True
    ] * 3
    assert told.index("rank 1 is gone") < told.index("SIGUSR1") < told.index("without a word")
    assert caught.value.code == 70


@pytest.mark.parametrize(
    "happenings",
    [
        (40, 40),  # not often enough
        (0, 40, 40),  # the first one got somewhere
        (40, 40, 40, "failed"),  # a person has seen it and gives the command again
        (40, "failed", 40, "failed", 40, "failed"),
        (40, ("stop", {"cause": "Ctrl-C"}), 40, 40),
        (40, ("stop", {"cause": "STOP file"}), 40, 40),
        (40, "preempted", ("requeue", {"cause": "SIGTERM"}), 40, 40),
        (20, 20, 20),  # the newest checkpoint is beyond
    ],
)
def test_what_is_no_repetition_goes_on(events, happenings):
    tell(events, *happenings)
    crash_loop.refuse_if_stuck(events, 40, LIMIT)


def test_a_run_without_a_ledger_starts(events):
    crash_loop.refuse_if_stuck(events, 0, 1)


def test_starts_that_a_time_limit_ends_before_the_first_checkpoint_do_count(events):
    stop = ("requeue", {"cause": "deadline"})
    tell(events, 0, stop, 0, stop, 0, stop)
    with pytest.raises(TrainingError, match="beyond step 0"):
        crash_loop.refuse_if_stuck(events, 0, LIMIT)
