"""Against ranks that wait for ever for one that does not answer."""

from __future__ import annotations

import pytest
from cases import EVERYTHING, LOADING
from injection import Fault
from runs import IMPATIENT, IMPATIENT_SEC
from support.forked import AFTER_FAILURE_SEC

from forge.core.errors import Exit

# A start, the steps, the restart and the way to the goal, on a machine that does other things too; less
# than the patience that would show in its place, of a minute.
MARGIN_SEC = 40.0


ASLEEP = {
    "all-reduce of gradients in step 8": Fault("stop", "data.read", at=8, rank=1),
    "load of the checkpoint": Fault("stop", "load.read", rank=1),
    "replication of the model": Fault("stop", "load.done", rank=1),
    "check of digests": Fault("stop", "load.verify", rank=1),
    "wait for the save of step 4": Fault("stop", "commit.rename", rank=0),
}


@pytest.mark.parametrize("collective", list(ASLEEP)[: len(ASLEEP) if EVERYTHING else 2])
def test_rank_that_is_stopped_is_named_with_the_collective(
    collective, runs, resumable, uninterrupted
):
    fault = ASLEEP[collective]
    run = (resumable if fault.point in LOADING else runs)("asleep", 2)
    ended = run.train(fault, more=IMPATIENT)
    assert ended.code == Exit.DONE, ended.text
    assert ended.seconds < IMPATIENT_SEC + AFTER_FAILURE_SEC + MARGIN_SEC
    [lost] = run.events("lost")
    assert f"rank {fault.rank} of 2 exited without a record" in lost["message"]
    assert f"rank {1 - fault.rank} saw: {collective}: " in lost["message"]
    assert lost["message"] in ended.text
    assert run.story() == uninterrupted(2)
    run.assert_whole()


def test_rank_that_dies_is_noticed_at_once(runs, uninterrupted):
    run = runs("dead", 2, "--machine.fabric.timeout_sec=60")
    ended = run.train(Fault("kill", "data.read", at=8, rank=1))
    assert ended.code == Exit.DONE, ended.text
    assert ended.seconds < MARGIN_SEC
    [lost] = run.events("lost")
    assert "rank 1 of 2 exited without a record" in lost["message"]
    assert "all-reduce of gradients in step 8: " in lost["message"] and "by peer" in lost["message"]
    assert "typically" not in lost["message"]  # Gloo's advice to look into logs
    assert run.story() == uninterrupted(2)
