"""Against burning the queue: starts that get nowhere are counted, a person's stops are not."""

import pytest
from support import happenings

from forge.core.errors import TrainingError
from forge.core.events import read, record
from forge.run import crash_loop

LIMIT = 3


@pytest.fixture
def events(tmp_path):
    return tmp_path / "events.jsonl"


def tell(events, *these):
    """Each of these: the step that a start begins at, or an event."""
    for number, one in enumerate(these):
        is_start = isinstance(one, int)
        event = happenings.launch(one, launch=f"start-{number}") if is_start else one
        record(events, event)


def test_starts_at_the_same_step_end_with_the_reason_of_each(events):
    tell(events, 0, 40, happenings.lost("rank 1 is gone"), 40, happenings.requeue("SIGUSR1"), 40)
    with pytest.raises(TrainingError) as caught:
        crash_loop.refuse_if_stuck(events, 40, LIMIT)
    told = str(caught.value)
    assert "3 launches in a row did not get beyond step 40" in told
    assert [reason in told for reason in ("rank 1 is gone", "SIGUSR1", "no end is recorded")] == [
        True
    ] * 3
    assert told.index("rank 1 is gone") < told.index("SIGUSR1") < told.index("no end is recorded")
    assert caught.value.code == 70


def test_start_that_a_full_disk_ended_is_not_said_to_be_killed(events):
    """No end of it is recorded, as it is tried again."""
    full = happenings.rank_error("cannot write x: No space left on device\n  fix: free some")
    tell(events, 40, full, 40, full, 40)
    told = crash_loop.launches_without_progress(read(events), 40)
    full = "cannot write x: No space left on device"
    assert told[:2] == [f"start-0: {full}", f"start-2: {full}"]
    assert told[2].endswith("or a disk was full")


@pytest.mark.parametrize(
    "these",
    [
        (40, 40),  # not often enough
        (0, 40, 40),  # the first one got somewhere
        (40, 40, 40, happenings.failed()),  # a person has seen it and gives the command again
        (40, happenings.failed(), 40, happenings.failed(), 40, happenings.failed()),
        (40, happenings.stop("Ctrl-C"), 40, 40),
        (40, happenings.stop("STOP file"), 40, 40),
        (40, happenings.preempted(), happenings.requeue("SIGTERM"), 40, 40),
        (20, 20, 20),  # the newest checkpoint is beyond
    ],
)
def test_an_event_that_is_not_a_repetition_is_not_counted(events, these):
    tell(events, *these)
    crash_loop.refuse_if_stuck(events, 40, LIMIT)


def test_a_run_without_an_event_log_starts(events):
    crash_loop.refuse_if_stuck(events, 0, 1)


def test_starts_that_a_time_limit_ends_before_the_first_checkpoint_do_count(events):
    stop = happenings.requeue("deadline")
    tell(events, 0, stop, 0, stop, 0, stop)
    with pytest.raises(TrainingError, match="beyond step 0"):
        crash_loop.refuse_if_stuck(events, 0, LIMIT)
