"""Against samples that are skipped or repeated where a run goes on with another number of ranks."""

from __future__ import annotations

import pytest
from injection import Fault
from runs import GOAL

from forge.core.errors import Exit

BATCH, STOP_AT = 12, 7
SETTINGS = (f"--train.batch_size={BATCH}", "--model.dropout=0")
# Sums in another order. Measured: 1.2e-6 at most, over 20 steps of losses between 4 and 6.
SAME_LOSS = 1e-5


@pytest.fixture(scope="module")
def alone(session_runs):
    """The uninterrupted run on one rank."""
    run = session_runs("alone", 1, *SETTINGS)
    ended = run.train()
    assert ended.code == Exit.DONE, ended.text
    return run.story()


@pytest.mark.default
@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 2), (2, 3), (3, 2)])
def test_no_sample_is_skipped_or_repeated_and_losses_agree(first, second, runs, alone):
    run = runs(f"from-{first}-to-{second}", first, *SETTINGS)
    stopped = run.train(Fault("term", "data.read", at=STOP_AT, rank=first - 1))
    assert stopped.code == Exit.STOPPED, stopped.text
    run = run.on(second)
    ended = run.train()
    assert ended.code == Exit.DONE, ended.text
    assert [event["world_size"] for event in run.events("init")] == [first, second]
    assert run.starts() == [0, STOP_AT]

    story = run.story()
    numbers = [number for pairs in story.samples.values() for number, _ in pairs]
    assert numbers == list(range(GOAL * BATCH))
    assert story.samples == alone.samples
    apart = {step: abs(loss - alone.losses[step]) for step, loss in story.losses.items()}
    assert len(apart) == GOAL
    print(f"{first} -> {second}: losses {max(apart.values()):.2g} apart at most")
    assert max(apart.values()) < SAME_LOSS, apart
