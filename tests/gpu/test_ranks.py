"""Against two ranks that share a GPU: NCCL fails with "Duplicate GPU detected", or waits for minutes."""

from __future__ import annotations

from support.live_run import TWO_RANKS

from forge.core.errors import Exit


def test_more_ranks_than_gpus_are_refused_with_what_to_do(device, new_run, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    run = new_run("two", "--machine.device=cuda")
    done = run.start("train", *TWO_RANKS).end()
    assert done.code == Exit.CONFIG, done.text
    shared = "ranks 0, 1 on " if device.type == "cuda" else "2 of 2 ranks have no GPU of their own"
    assert shared in done.text
