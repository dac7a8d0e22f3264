"""Against a training step that waits for the GPU, races with it, or computes on the wrong device."""

import pytest

# All pairs of values of these settings.
SETTINGS = ("shard", "recompute", "fp8", "document_mask", "spike", "deterministic", "optimizer")
PAIRS = [
    ("none", "none", None, False, None, True, "adamw"),
    ("none", "selective", "tensorwise", True, "skip", False, "muon"),
    ("none", "full", "rowwise", False, "skip", True, "muon"),
    ("all", "none", "tensorwise", False, "skip", True, "muon"),
    ("all", "selective", "rowwise", True, None, True, "adamw"),
    ("all", "full", None, True, "skip", False, "adamw"),
    (4, "none", "rowwise", True, "skip", False, "muon"),
    (4, "selective", None, False, None, True, "muon"),
    (4, "full", "tensorwise", False, None, False, "adamw"),
]
LAYERS, MICRO_BATCHES, RANKS = 3, 2, 8  # of a Case
BLOCK = 4 * 128 * 128 + 3 * 128 * 384 + 2 * 128  # numbers of a block: dim 128, ffn_dim 384
REST = 512 * 128 + 128  # the embedding, which is the output layer too, and the last norm


@pytest.mark.parametrize("values", PAIRS, ids=lambda values: "-".join(map(str, values)))
def test_step_waits_for_nothing_but_the_results_of_the_step_before(simulate, values):
    train = dict(zip(SETTINGS, values, strict=True))
    step = simulate(train=train)
    assert (step.races, step.wrong_devices) == ([], [])
    assert step.waits == []
    exchanges = 2 if train["optimizer"] == "muon" and train["shard"] != "none" else 0
    assert step.operations.get("all-to-all", 0) == exchanges
    assert step.event_waits == 1
    assert step.pinned_copies >= 2 * MICRO_BATCHES + 2  # the batch, the flags, the results


def test_all_pairs_of_settings_are_among_the_cases():
    for first in range(len(SETTINGS)):
        for second in range(first):
            seen = {(values[first], values[second]) for values in PAIRS}
            wanted = {(a[first], b[second]) for a in PAIRS for b in PAIRS}
            assert wanted == seen, (SETTINGS[first], SETTINGS[second])


@pytest.mark.parametrize("shard", ["all", 4])
def test_shards_gather_and_reduce_each_block_as_often_as_needed(simulate, shard):
    """Forward and backward gather each block, and the rest, which both ends share, once a micro-batch.
    Gradients are reduced once a micro-batch; over copies of the model in the last one only."""
    step = simulate(train={"shard": shard})
    ranks = RANKS if shard == "all" else shard
    losses = 4 * (2 + 3)  # bytes: loss, norm and three flags
    assert step.operations["all-gather"] == MICRO_BATCHES * (2 * LAYERS + 1) + 1
    numbers = MICRO_BATCHES * (2 * LAYERS * BLOCK + REST)
    assert step.moved["all-gather"] == 2 * numbers // ranks + losses  # bf16
    assert step.operations["reduce-scatter"] == MICRO_BATCHES * (LAYERS + 1)
    assert step.moved["reduce-scatter"] == 4 * MICRO_BATCHES * (LAYERS * BLOCK + REST)  # fp32
    of_copies = 0 if shard == "all" else LAYERS + 1
    assert step.operations["all-reduce"] == of_copies + 1  # the norm


def test_replicas_reduce_gradients_once_a_step_and_gather_nothing(simulate):
    step = simulate(train={"shard": "none"})
    assert step.operations["all-gather"] == 1  # the losses
    assert step.moved["all-reduce"] == 4 * (LAYERS * BLOCK + REST)


@pytest.mark.parametrize(("recompute", "again"), [("none", 0), ("selective", 2), ("full", 6)])
def test_backward_pass_computes_the_products_again_that_the_policy_names(
    simulate, recompute, again
):
    """A block has seven: forward one each, backward two. `selective` keeps all but the wide half of the
    feed-forward; `full` keeps none, and does not need the last one, whose output no product of the
    block reads."""
    step = simulate(train={"shard": "all", "recompute": recompute})
    assert step.operations["aten.mm.default"] == LAYERS * MICRO_BATCHES * (7 * 3 + again)
