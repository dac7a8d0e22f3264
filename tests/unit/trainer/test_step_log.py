"""Steps that a program tells: from them come its status, its rate, and which steps were retrained."""

import pytest
from support import happenings

from forge.core import events
from forge.core.paths import RunPaths
from forge.reporting.history import read_history
from forge.trainer import metrics
from forge.trainer.metrics import StepLog


@pytest.fixture
def paths(tmp_path):
    events.record(RunPaths(tmp_path).events, happenings.launch(40, launch="first"))
    return RunPaths(tmp_path)


def steps(paths):
    return [(line.launch, line.step) for line in metrics.read(paths.metrics)]


def test_the_step_that_all_ranks_have_reached_is_written_and_the_last_step_at_once(paths):
    log = StepLog(paths)
    log.tell([None, 41], is_last=False)
    log.tell([41, 42], is_last=False)
    log.tell([43, 43], is_last=False)  # a moment later
    assert steps(paths) == [("first", 41)]
    log.tell([44, 43], is_last=True)
    log.tell([44, 43], is_last=True)
    assert steps(paths) == [("first", 41), ("first", 43)]


def test_a_launch_has_its_steps_from_the_one_that_it_resumed_from(paths):
    StepLog(paths).tell([47], is_last=True)
    [launch] = read_history(paths).launches
    assert (launch.resumed_step, launch.last_step) == (40, 47)
