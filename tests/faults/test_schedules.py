"""Against what nobody thought of: runs that are interrupted at random, several times."""

from __future__ import annotations

import os
import random
import uuid

import hypothesis
import pytest
from cases import EVERYTHING, ON_EVERY_RANK
from hypothesis import strategies as st
from injection import Fault

from forge.core.errors import Exit
from forge.core.failpoints import FAILPOINTS

SEED = int(os.environ.get("FORGE_FAULTS_SEED") or random.SystemRandom().randrange(2**32))
PARTS, EXAMPLES = (4, 4) if EVERYTHING else (1, 1)
INTERRUPTIONS = {"kill": Exit.DONE, "power": -9, "term": Exit.STOPPED}


@st.composite
def interruptions(draw: st.DrawFn, ranks: int) -> Fault:
    point = draw(st.sampled_from(sorted(FAILPOINTS)))
    # A fresh run trains 20 steps and saves 5 times; most of what is drawn strikes.
    at = draw(st.integers(1, 14 if point == "data.read" else 3))
    rank = draw(st.integers(0, ranks - 1)) if point in ON_EVERY_RANK else 0
    return Fault(draw(st.sampled_from(sorted(INTERRUPTIONS))), point, at=at, rank=rank)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("ranks", [1, 2])
def test_random_interruptions_change_nothing(ranks, part, session_runs, uninterrupted):
    seed = SEED + part
    print(f"FORGE_FAULTS_SEED={SEED} brings these schedules back")

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=EXAMPLES,
        database=None,
        # An example takes seconds: what failed is short enough as it is.
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(st.lists(interruptions(ranks), min_size=2, max_size=4))
    def is_unchanged(schedule: list[Fault]) -> None:
        hypothesis.note(str(schedule))
        run = session_runs(f"random-{uuid.uuid4().hex[:12]}", ranks)
        for fault in schedule:
            struck = len(run.strikes())
            ended = run.train(fault)
            wanted = INTERRUPTIONS[fault.kind] if len(run.strikes()) > struck else Exit.DONE
            # A stop signal in the last save finds the goal reached.
            assert ended.code in (wanted, Exit.DONE), ended.text
        ended = run.train()
        assert ended.code == Exit.DONE, ended.text
        assert run.story() == uninterrupted(ranks)
        run.assert_whole()

    is_unchanged()
