"""Against a rewind that is forgotten, counted twice, or done for ever."""

from __future__ import annotations

import pytest
from support import happenings
from support.manifests import IDS, manifest_of

from forge.checkpoint import rewinds
from forge.checkpoint.manifest import LeftOutBatches
from forge.core import events
from forge.core.config import load_config
from forge.data.content_ids import resolve
from forge.data.left_out import LeftOut


def manifest(*entries):
    recorded = [LeftOutBatches(step=step, batches=batches) for step, batches in entries]
    return manifest_of(40, left_out=recorded)


CONFIG = resolve(load_config("/dev/null", {"ids": IDS, "train.seed": 7}))
ORDER = {"seed": 7, "tokens": CONFIG.ids.tokens}


def test_decisions_after_a_checkpoint_was_saved_follow_those_in_its_manifest(tmp_path):
    log = tmp_path / "events.jsonl"
    events.record(log, happenings.rewind(**{**ORDER, "seed": 8}))
    events.record(log, happenings.rewind(**{**ORDER, "tokens": "0123456789ab"}))
    for number, (step, batches) in enumerate([(20, 2), (28, 4), (28, 3)], 1):
        facts = {"number": number, "to_step": step, "batches": batches, **ORDER}
        events.record(log, happenings.rewind(**facts))
    decisions = rewinds.decided(log, CONFIG)
    everything = LeftOut(((20, 2), (28, 4), (28, 3)))
    for known in range(4):
        found = rewinds.left_out(manifest(*everything.entries[:known]), decisions)
        assert found == everything
    assert rewinds.left_out(None, decisions) == everything
    assert rewinds.left_out(manifest((20, 2))) == LeftOut(((20, 2),))
    assert rewinds.left_out(None) == LeftOut()


def test_manifest_has_them_in_order():
    entries = ((20, 2), (28, 4))
    assert rewinds.to_record(LeftOut(entries)) == manifest(*entries).left_out
    assert rewinds.to_record(LeftOut()) == []


def test_next_batch_is_the_one_after_the_spike_also_in_the_second_rewind():
    why = {"reason": "odd", "config": CONFIG}
    first = rewinds.decide(LeftOut(), 20, 25, **why)
    assert (first.number, first.to_step, first.batches, first.spike) == (1, 20, 6, 26)
    left_out = LeftOut(((20, 6),))
    second = rewinds.decide(left_out, 20, 22, **why)
    assert (second.number, second.batches) == (2, 3)
    after = LeftOut((*left_out.entries, (20, second.batches)))
    assert after.batch(20) == left_out.batch(22) + 1 == 29
    # Back before an older decision, whose checkpoint was corrupt: nothing is repeated.
    third = rewinds.decide(left_out, 16, 22, **why)
    assert LeftOut((*left_out.entries, (16, third.batches))).batch(16) == left_out.batch(22) + 1


@pytest.mark.parametrize(
    ("entries", "saved", "spike", "stages", "reason"),
    [
        ((), 0, 3, [0], ""),
        (((20, 1), (20, 1), (24, 5)), 20, 21, [], ""),
        (((20, 1), (20, 1), (20, 5)), 20, 21, [], "3 rewinds to step 20 did not help"),
        ((), 20, 25, [0, 20, 26], ""),
        ((), 20, 25, [0, 21], "a stage of train.mix began at step 21, after the checkpoint at 20"),
    ],
)
def test_rewinds_that_cannot_help_are_refused(entries, saved, spike, stages, reason):
    assert rewinds.refusal(LeftOut(entries), saved, spike, stages) == reason
