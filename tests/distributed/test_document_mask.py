"""Against a mask that differs with the number of ranks, after a resume, or in validation."""

from __future__ import annotations

from support.live_run import TWO_RANKS

MASKED = "--train.document_mask=true"
SAME_LOSS = 1e-4


def test_masked_run_is_the_same_sharded_replicated_and_on_one_rank_and_validates(runs, solo):
    alone = runs("masked", MASKED, "--train.max_steps=6")
    shared = runs("shared", MASKED, "--train.max_steps=3")
    started = alone.fork("train")
    sharded = shared.forge("train", *TWO_RANKS, "--train.shard=all", "--train.recompute=selective")
    assert sharded.code == 0, sharded.text
    replicated = shared.forge("train", *TWO_RANKS, "--train.max_steps=6")
    assert replicated.code == 0, replicated.text
    on_one_rank = started.end()
    assert on_one_rank.code == 0, on_one_rank.text

    expected, found, plain = (dict(run.losses()) for run in (alone, shared, solo))
    assert max(abs(found[step] - expected[step]) for step in range(1, 7)) < SAME_LOSS
    assert max(abs(plain[step] - expected[step]) for step in range(1, 7)) > SAME_LOSS

    # The reference losses and, from the checkpoint at step 3, the following ones are recomputed.
    for run in (alone, shared):
        validated = run.forge("validate", "--train.max_steps=6")
        assert validated.code == 0, validated.text

    unmasked = alone.forge("train", "--train.document_mask=false")
    assert unmasked.code == 78
    assert "train.document_mask is False, the checkpoint has True" in unmasked.text


def test_resumed_masked_run_ends_with_the_same_bits(runs):
    whole = runs("whole", MASKED, "--model.dropout=0.1", "--train.max_steps=4")
    parts = runs("parts", MASKED, "--model.dropout=0.1", "--train.max_steps=2")
    started = whole.fork("train", "--train.decay_steps=12")
    assert parts.forge("train").code == 0
    assert parts.forge("train", "--train.max_steps=4").code == 0
    assert started.end().code == 0
    assert parts.losses() == whole.losses()
    assert parts.weights_digest() == whole.weights_digest()
