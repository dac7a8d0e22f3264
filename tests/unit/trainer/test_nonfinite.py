"""Against a run that ends because of one bad batch, and one that goes on with broken weights."""

import pytest

from forge.core.train_settings import Train
from forge.trainer.divergence import SkippedCounts

BAD = "loss nan and gradient norm nan on rank 0 are not finite"


def test_skipped_updates_are_counted_in_the_run_and_in_a_row():
    skipped, settings = SkippedCounts(), Train(on_nonfinite="skip", max_skipped_steps=3)
    for trouble, expected in [(BAD, (1, 1)), (BAD, (2, 2)), ("", (2, 0)), (BAD, (3, 1))]:
        assert skipped.count(trouble, settings) == ""
        assert (skipped.steps, skipped.in_a_row) == expected


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (Train(on_nonfinite="stop"), "the weights were not updated"),
        (
            Train(on_nonfinite="skip", max_skipped_steps=1),
            "the 1 steps before it were skipped already (train.max_skipped_steps is 1)",
        ),
    ],
)
def test_update_that_may_not_be_skipped_ends_training_and_says_why(settings, reason):
    skipped = SkippedCounts(steps=1, in_a_row=1)
    assert skipped.count(BAD, settings) == f"{BAD}; {reason}"
    assert skipped == SkippedCounts(steps=1, in_a_row=1)
