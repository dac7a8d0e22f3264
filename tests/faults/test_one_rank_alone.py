"""Against ranks that decide for themselves what all must do alike."""

from __future__ import annotations

import pytest
from plans import Plan

from forge.core.errors import Exit


@pytest.mark.parametrize("rank", [0, 1])
def test_room_for_a_copy_on_one_rank_only_means_that_all_wait_for_each_save(
    rank, runs, uninterrupted
):
    run = runs(f"no-memory-{rank}", 2)
    ended = run.train(plan=Plan(poison="no-memory", poison_rank=rank))
    assert ended.code == Exit.DONE, ended.text
    assert run.events("lost") == []
    assert run.story() == uninterrupted(2)
    saves = run.events("save")
    assert saves and all(save["stall"] >= save["seconds"] for save in saves)


def test_all_ranks_resume_from_the_checkpoint_that_rank_0_sees(resumable, uninterrupted):
    run = resumable("old-view", 2)
    ended = run.train(plan=Plan(poison="old-view", poison_rank=1))
    assert ended.code == Exit.DONE, ended.text
    assert run.events("lost") == []
    assert run.story() == uninterrupted(2)


@pytest.mark.weekly
def test_compiler_that_fails_on_one_replica_leaves_all_uncompiled_and_waits_for_nobody(
    runs, uninterrupted
):
    run = runs("uncompiled", 2, "--train.compile=true", "--machine.fabric.timeout_sec=240")
    plan = Plan(poison="no-compiler", poison_rank=1)
    ended = run.start_train(plan=plan).end(500)
    assert ended.code == Exit.DONE, ended.text
    assert "training without torch.compile: it failed on another rank" in ended.text
    assert run.story() == uninterrupted(2)
