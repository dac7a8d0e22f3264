"""Training in float8. Against a run that resumes with other bits, or that validation cannot recompute."""

from __future__ import annotations

from support.live_run import TWO_RANKS

FP8 = "--train.fp8=rowwise"
SHARDED = (*TWO_RANKS, "--train.shard=all")


def test_resumed_float8_run_has_the_bits_of_an_uninterrupted_one_and_validates(runs, solo):
    whole = runs("whole", FP8, "--train.max_steps=6")
    parts = runs("parts", FP8, "--train.max_steps=3")
    started = whole.fork("train", *SHARDED)
    for steps in (3, 6):
        done = parts.forge("train", *SHARDED, f"--train.max_steps={steps}")
        assert done.code == 0, done.text
    assert started.end().code == 0
    assert parts.losses() == whole.losses()
    assert parts.weights_digest() == whole.weights_digest()

    plain = dict(solo.losses())
    apart = [abs(loss - plain[step]) for step, loss in parts.losses()]
    assert 1e-5 < max(apart) < 5e-2

    validated = parts.forge("validate", "--train.max_steps=6")
    assert validated.code == 0, validated.text
    assert "recomputed, bitwise equal" in validated.text

    unscaled = parts.forge("train", *SHARDED, "--train.fp8=null", "--train.max_steps=6")
    assert unscaled.code == 78
    assert "train.fp8 is None, the checkpoint has 'rowwise'" in unscaled.text
