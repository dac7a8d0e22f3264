"""Against batches that a rewind repeats or loses, and stages of a mix that it moves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forge.core.mix import MixStage
from forge.data.left_out import LeftOut
from forge.data.loader import Loader, Windows
from forge.data.sample_order import MixedOrder
from forge.data.shards import Shard

# At step 20 two batches, then at step 28 four and three more.
SOME = LeftOut(((20, 2), (28, 4), (28, 3)))


def test_batches_follow_on_each_other_but_for_those_left_out():
    numbers = [SOME.batch(step) for step in range(40)]
    assert numbers == [*range(20), *range(22, 30), *range(37, 49)]
    assert SOME.batches(np.arange(40)).tolist() == numbers
    assert SOME.total == 9
    nothing = LeftOut()
    assert nothing.batches(np.arange(3)).tolist() == [0, 1, 2] and nothing.batch(7) == 7


def test_loader_reads_the_later_batches_on_every_rank_and_after_a_resume():
    tokens = torch.arange(601, dtype=torch.int32).numpy()
    shard = type("Memory", (Shard,), {"read": lambda self: tokens, "num_tokens": 601})
    windows = Windows([shard.__new__(shard)], 4)

    def rows(step, left_out, rank=0, ranks=1):
        loader = Loader(
            windows, seed=1, batch_size=4, rank=rank, world_size=ranks, left_out=left_out
        )
        return loader.batch(step)[0]

    for step in (0, 19, 20, 27, 28, 39):
        expected = rows(SOME.batch(step), LeftOut())
        assert rows(step, SOME).equal(expected)
        assert torch.cat([rows(step, SOME, rank, 2) for rank in (0, 1)]).equal(expected)


@pytest.mark.parametrize("second", [12, 20, 24])
def test_stages_of_a_mix_begin_with_their_step_and_no_window_is_drawn_twice(second):
    """The second stage: before what is left out, with its first batch, after it."""
    size, sizes = 8, {"code": 400, "web": 400}
    left_out = LeftOut(((20, 3),))
    stages = [MixStage(0, {"code": 1, "web": 3}), MixStage(second, {"code": 3, "web": 1})]
    order = MixedOrder(
        [MixStage(left_out.stage_start(stage.step), stage.weights) for stage in stages],
        sizes,
        drawn_before={},
        seed=3,
        batch_size=size,
    )
    batches = [left_out.batch(step) for step in range(40)]
    numbers = np.array(batches, np.uint64)[:, None] * np.uint64(size) + np.arange(
        size, dtype=np.uint64
    )
    assert len(np.unique(order.windows(numbers))) == 40 * size
    sources, _ = order.locate(numbers.astype(np.int64))
    of_code = (sources == 0).sum(axis=1)
    assert (of_code[:second] == 2).all() and (of_code[second:] == 6).all()
    # A child draws on behind the batches that are left out.
    assert order.drawn(batches[-1] * size + size) == {
        name: (order.locate(np.arange((batches[-1] + 1) * size))[0] == place).sum()
        for place, name in enumerate(sizes)
    }
