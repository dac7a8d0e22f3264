"""Against ranks that wait for ever for one that does not answer, and restarts that do not tell why."""

from __future__ import annotations

import pickle
import re

import pytest
from cases import EVERYTHING, LOADING
from injection import Fault
from plans import Plan
from runs import IMPATIENT, IMPATIENT_SEC
from support.forked import AFTER_FAILURE_SEC

from forge.core.errors import Exit
from forge.core.process import hostname

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
    # The launcher may see its process before the others give up: tests/unit/launch/test_stopped_ranks.py.
    assert re.match(
        rf"rank {fault.rank} of 2 on {hostname()} did not arrive at the {collective}"
        r"( and does not respond|: stopped by SIGSTOP \(pid \d+, state T\))"
        rf"; rank {1 - fault.rank} saw: {collective}: ",
        lost["message"],
    )
    assert lost["message"] in ended.text
    assert run.story() == uninterrupted(2)
    run.assert_whole()


NEVER_READ = {
    "check of digests": Fault("hang", "load.verify", rank=1),
    # The thread of rank 1 that saves waits for rank 0 all the time, and is not to blame.
    "wait for the save of step 4": Fault("hang", "commit.rename", rank=0),
}


@pytest.mark.parametrize("phase", NEVER_READ)
def test_rank_whose_disk_never_answers_is_named_after_the_deadline(
    phase, runs, resumable, uninterrupted
):
    fault = NEVER_READ[phase]
    run = (resumable if fault.point in LOADING else runs)("no-disk", 2)
    deadline_sec = IMPATIENT_SEC + 1
    plan = Plan((fault,), slowest_disk_sec=deadline_sec)
    ended = run.train(plan=plan, more=IMPATIENT)
    assert ended.code == Exit.DONE, ended.text
    assert ended.seconds < deadline_sec + AFTER_FAILURE_SEC + MARGIN_SEC
    [lost] = run.events("lost")
    assert re.fullmatch(
        rf"rank {fault.rank} of 2 on {hostname()} was in the {phase} for \d+ s; rank"
        rf" {1 - fault.rank} saw: {phase}: rank {fault.rank} did not arrive after {deadline_sec} s",
        lost["message"],
    ), lost["message"]
    assert run.story() == uninterrupted(2)
    run.assert_whole()


def test_rank_that_hangs_in_a_data_read_is_named_and_all_ranks_tell_where_they_are(
    runs, uninterrupted
):
    run = runs("hangs", 4)
    ended = run.train(Fault("hang", "data.read", at=8, rank=2), more=IMPATIENT)
    assert ended.code == Exit.DONE, ended.text
    [lost] = run.events("lost")
    assert re.match(
        rf"rank 2 of 4 on {hostname()} did not arrive at the all-reduce of gradients in step 8 and was in"
        r" the data read of step 8 for \d+ s; rank \d saw: all-reduce of gradients in step 8: ",
        lost["message"],
    )
    assert lost["message"] in ended.text
    first, *_ = sorted(run.paths.logs.glob(f"*.{hostname()}.2.log"))
    logs = [first.with_name(first.name.replace(".2.log", f".{n}.log")) for n in range(4)]
    told = [log.read_text() for log in logs]
    assert "rank 2 has been in the data read of step 8 for" in told[2]
    assert "in _hang" in told[2] and "in _read" in told[2]  # the stack of the injected fault
    for rank in (0, 1, 3):
        assert f"rank {rank} has been in the all-reduce of gradients in step 8 for" in told[rank]
        assert "in backward" in told[rank]
    start = first.name.removesuffix(f".{hostname()}.2.log")
    recorded = [run.paths.logs / f"{start}.flight-recorder.{rank}" for rank in range(4)]
    groups = [pickle.loads(file.read_bytes())["pg_status"]["0"] for file in recorded]
    begun = [group["last_enqueued_collective"] for group in groups]
    assert begun == [begun[2] + 1, begun[2] + 1, begun[2], begun[2] + 1]
    assert run.story() == uninterrupted(4)
    run.assert_whole()


def test_rank_that_dies_is_noticed_at_once(runs, uninterrupted):
    run = runs("dead", 2, "--machine.fabric.timeout_sec=60")
    ended = run.train(Fault("kill", "data.read", at=8, rank=1))
    assert ended.code == Exit.DONE, ended.text
    assert ended.seconds < MARGIN_SEC
    [lost] = run.events("lost")
    assert f"rank 1 of 2 exited without a record on {hostname()}" in lost["message"]
    assert "all-reduce of gradients in step 8: " in lost["message"] and "by peer" in lost["message"]
    assert "typically" not in lost["message"]  # Gloo's advice to look into logs
    assert run.story() == uninterrupted(2)
