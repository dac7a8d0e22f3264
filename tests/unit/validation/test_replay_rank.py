"""The steps that validation trains again are judged and named as in training."""

from types import SimpleNamespace

import pytest

from forge.core.config import Config, checked
from forge.core.errors import TrainingError
from forge.trainer.divergence import SkippedCounts
from forge.validation import replay_rank


@pytest.mark.parametrize(
    ("trouble", "is_spike", "fix"),
    [
        ("loss nan and gradient norm 1.0 on rank 0 are not finite", False, "train.on_nonfinite"),
        ("the loss 9 is a spike, above 5", True, "train.spike_factor"),
    ],
)
def test_bad_step_is_counted_from_one_and_called_what_it_is(trouble, is_spike, fix):
    values = {"train": {"max_steps": 13, "spike": "stop" if is_spike else None}}
    config = checked(Config, values, "config")
    good = SimpleNamespace(trouble="", is_spike=False, loss=3.0, lr=0.1)
    bad = SimpleNamespace(trouble=trouble, is_spike=is_spike, loss=9.0, lr=0.1)
    results = {10: good, 11: bad}  # by the number of steps before
    start = SimpleNamespace(
        step=10,
        skipped=SkippedCounts,
        train_step=lambda step: SimpleNamespace(read=lambda: results[step]),
    )
    with pytest.raises(TrainingError, match=f"^step 12: {trouble}") as caught:
        replay_rank._losses(config, start)
    assert fix in caught.value.fix
