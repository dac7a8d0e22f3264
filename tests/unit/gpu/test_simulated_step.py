"""Against a training step that waits for the GPU, races with it, or computes on the wrong device."""

from typing import get_args

import pytest
from support.repository import REPOSITORY as ROOT
from support.simulated_gpu.training import Case, shape_of

from forge.core import collectives
from forge.core.config import load_config
from forge.core.optimizers import OPTIMIZERS

pytestmark = pytest.mark.all


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
OTHERS = [name for name in OPTIMIZERS if name not in ("adamw", "muon")]
LAYERS, MICRO_BATCHES = 3, 2  # of a Case


@pytest.mark.parametrize(
    "values",
    [*PAIRS, *(("all", "none", None, False, "skip", False, name) for name in OTHERS)],
    ids=lambda values: "-".join(map(str, values)),
)
def test_step_waits_for_nothing_but_the_results_of_the_step_before(simulate, values):
    train = dict(zip(SETTINGS, values, strict=True))
    step = simulate(train=train)
    assert (step.races, step.wrong_devices) == ([], [])
    assert step.waits == []
    exchanged = OPTIMIZERS[train["optimizer"]].exchanged_bytes
    exchanges = 2 if exchanged and train["shard"] != "none" else 0
    assert step.operations.get("all-to-all", 0) == exchanges
    assert step.event_waits == 1
    assert step.pinned_copies >= 2 * MICRO_BATCHES + 2  # the batch, the flags, the results


def test_all_pairs_of_settings_are_among_the_cases():
    for first in range(len(SETTINGS)):
        for second in range(first):
            seen = {(values[first], values[second]) for values in PAIRS}
            wanted = {(a[first], b[second]) for a in PAIRS for b in PAIRS}
            assert wanted == seen, (SETTINGS[first], SETTINGS[second])


BF16, UNTIED = {"reduce_dtype": "bf16"}, {"tie_embeddings": False}
NORMS = 4 * 32  # bytes: the norm of each weight tensor, which go together into one all-reduce


@pytest.mark.parametrize(
    ("train", "model"),
    [
        ({"shard": "all"}, {}),
        ({"shard": "all", **BF16}, UNTIED),
        ({"shard": 4}, UNTIED),
        ({"shard": 4, **BF16}, {}),
        ({"shard": "none"}, {}),
        ({"shard": "none", **BF16}, UNTIED),
        *(({"shard": "all", "optimizer": name}, {}) for name in ("muon", *OTHERS)),
        ({"shard": "none", "optimizer": "muon"}, {}),
    ],
    ids=str,
)
def test_collectives_are_those_that_forge_plan_counts(simulate, train, model):
    """Blocks are gathered for forward and backward, both ends once, in every micro-batch; gradients are
    reduced in every micro-batch, over the copies of the model in the last one only."""
    step = simulate(train=train, model=model)
    planned = collectives.of_step(shape_of(Case(train=train, model=model)))
    for name in get_args(collectives.Name):
        entries = [entry for entry in planned if entry.name == name]
        assert step.operations.get(name, 0) == sum(entry.number for entry in entries)
        num_bytes = sum(entry.num_bytes for entry in entries)
        # Of 21 matrices on 8 ranks the first rank orthogonalizes 3, and sends these back.
        apart = 0.12 * num_bytes if name == "all-to-all" else NORMS
        assert step.moved.get(name, 0) == pytest.approx(num_bytes, abs=apart, rel=0)


@pytest.mark.parametrize(("recompute", "again"), [("none", 0), ("selective", 2), ("full", 6)])
def test_backward_pass_computes_the_products_again_that_the_policy_names(
    simulate, recompute, again
):
    """A block has seven: forward one each, backward two. `selective` keeps all but the wide half of the
    feed-forward; `full` keeps none, and does not need the last one, whose output no product of the
    block reads."""
    step = simulate(train={"shard": "all", "recompute": recompute})
    assert step.operations["aten.mm.default"] == LAYERS * MICRO_BATCHES * (7 * 3 + again)


@pytest.mark.parametrize(("size", "ranks"), [("7b", 32), ("70b", 128)])
def test_sizes_to_start_from_train_without_a_wait_at_their_real_widths(simulate, size, ranks):
    """One block, one sample a rank, on as many ranks as the size is meant for."""
    config = load_config(ROOT / f"config/sizes/{size}.yaml", {})
    model = {**config.model.model_dump(exclude_unset=True), "layers": 1}
    keys = config.train.model_dump(exclude_unset=True)
    train = {**keys, "batch_size": ranks, "micro_batch_size": 1, "seq_len": 256, "compile": False}
    step = simulate(ranks=ranks, train=train, model=model)
    assert (step.races, step.wrong_devices, step.waits) == ([], [], [])
    planned = collectives.of_step(shape_of(Case(ranks=ranks, train=train, model=model)))
    moved = sum(entry.num_bytes for entry in planned if entry.name == "reduce-scatter")
    assert step.moved["reduce-scatter"] == moved
