"""Against proofs that hold for forked ranks only: the same faults in ranks that are really launched.

The command is a process, torchrun starts two ranks, and what comes out must be equal to the last bit
to what the forked ranks of the uninterrupted run came to.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from cases import EVERYTHING, LOADING, Case
from support.live_run import MARK, MARK_VALUE, kill_all, living

from forge.core.errors import Exit

SIMPLEST = Case("commit.rename", "kill", 1)
CASES = [
    SIMPLEST,
    Case("save.write", "kill", 2),
    Case("save.sync", "kill", 1),
    Case("commit.latest", "kill", 2),
    Case("commit.intent", "term", 1),
    Case("save.written", "term", 2),
    Case("save.write", "enospc", 1),
    Case("commit.manifest", "eio", 2),
    Case("prune.remove", "kill", 1),
    Case("load.read", "kill", 2),
    Case("load.verify", "flip", 1),
    Case("data.read", "stop", 2),
]


@pytest.fixture(autouse=True)
def _nothing_outlives_its_test(monkeypatch):
    monkeypatch.setenv(MARK, MARK_VALUE)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as the forked ranks, for the last bits
    yield
    kill_all()


@pytest.mark.parametrize(
    "case", CASES if EVERYTHING else [SIMPLEST], ids=lambda case: f"launched-{case.name}"
)
def test_launched_ranks_end_as_the_uninterrupted_run(
    case, runs, resumable, uninterrupted, tmp_path
):
    expected = uninterrupted(case.ranks)
    name = case.name.replace(".", "-")
    run = (resumable if case.point in LOADING else runs)(name, case.ranks)
    [fault] = case.faults("")
    started = run.start(
        "train",
        PYTHONPATH=os.pathsep.join([str(Path(__file__).parent / "launched"), *_python_path()]),
        FORGE_FAULT=json.dumps(fault.to_json()),
        FORGE_FAULT_ONCE=str(tmp_path / "once"),
    )
    ended = started.end()
    assert [strike["kind"] for strike in run.strikes()][-1:] == [case.kind], ended.text
    assert ended.code == case.code, ended.text
    if ended.code != Exit.DONE:
        ended = run.start("train").end()
    assert ended.code == Exit.DONE, ended.text
    assert run.weights_digest() == expected.weights
    assert dict(run.losses()) == expected.losses
    assert bool(run.quarantined()) == case.is_quarantined
    run.assert_whole()
    assert living() == []


def _python_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
