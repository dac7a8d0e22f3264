"""Against a mix that drifts from its weights, repeats windows, or depends on where a run resumed."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.core.errors import ConfigError, DataError
from forge.core.mix import MixStage
from forge.data.loader import Loader
from forge.data.sample_order import MixedOrder
from forge.data.shards import Shard
from forge.data.windows import Windows, windows_by_source

unhurried = settings(max_examples=25)
WEIGHTS = st.one_of(st.just(0.0), st.floats(0.001, 10), st.integers(1, 9).map(float))
BATCH = 8


@st.composite
def mixes(draw, max_stages=3):
    """Stages with ascending steps, and sizes of their sources."""
    names = [f"s{number}" for number in range(draw(st.integers(1, 5)))]
    steps = sorted({0, *draw(st.lists(st.integers(1, 400), max_size=max_stages - 1))})
    all_weights = [
        draw(st.lists(WEIGHTS, min_size=len(names), max_size=len(names)).filter(any)) for _ in steps
    ]
    stages = [
        MixStage(step, dict(zip(names, weights, strict=True)))
        for step, weights in zip(steps, all_weights, strict=True)
    ]
    return stages, {name: draw(st.integers(15, 700)) for name in names}


def order_of(stages, sizes, drawn_before=None, seed=3, batch=BATCH):
    return MixedOrder(stages, sizes, drawn_before=drawn_before or {}, seed=seed, batch_size=batch)


def counted(sources, num_sources):
    return np.bincount(sources, minlength=num_sources)


@unhurried
@given(mixes(max_stages=1), st.integers(1, 6), st.integers(0, 10**12))
def test_at_the_end_of_each_block_counts_differ_from_the_weights_by_less_than_one(
    mix, num_blocks, far
):
    (stage,), sizes = mix
    order = order_of([stage], sizes)
    block = order.largest_block
    sources, _ = order.locate(np.arange(num_blocks * block))
    for end in (block * number for number in range(1, num_blocks + 1)):
        counts = counted(sources[:end], len(sizes))
        for name, count in zip(sizes, counts.tolist(), strict=True):
            assert abs(count - end * stage.shares[name]) < 1
            assert order.drawn(end)[name] == count
    end = far // block * block  # in closed form, also of a run of 10^9 steps
    for name, count in order.drawn(end).items():
        assert abs(count - end * stage.shares[name]) < 1


@unhurried
@given(mixes())
def test_each_source_is_drawn_in_order_through_all_stages_and_each_window_once_an_epoch(mix):
    stages, sizes = mix
    order = order_of(stages, sizes)
    numbers = np.arange(500 * BATCH)
    sources, draws = order.locate(numbers)
    windows = order.windows(numbers.astype(np.uint64))
    first = np.cumsum([0, *sizes.values()])
    for source, size in enumerate(sizes.values()):
        mine = sources == source
        assert draws[mine].tolist() == list(range(mine.sum())), "none left out, none twice"
        here = windows[mine] - first[source]
        for epoch in range(0, len(here), size):
            of_epoch = here[epoch : epoch + size]
            assert len(set(of_epoch.tolist())) == len(of_epoch)
            assert ((of_epoch >= 0) & (of_epoch < size)).all()


@unhurried
@given(mixes(), st.integers(0, 10**9), st.permutations(range(3 * BATCH)))
def test_a_sample_does_not_depend_on_which_others_are_asked_for(mix, step, chosen):
    order = order_of(*mix)
    start = step * BATCH
    together = order.windows(np.arange(start, start + 3 * BATCH, dtype=np.uint64))
    some = np.array(chosen, np.uint64) + np.uint64(start)
    assert np.array_equal(order.windows(some), together[chosen])
    assert order.windows(some[:1]) == together[chosen[0]]


@unhurried
@given(mixes(), st.integers(1, 450))
def test_drawn_counts_what_came_before_also_in_the_middle_of_a_block(mix, step):
    order = order_of(*mix)
    sources, _ = order.locate(np.arange(step * BATCH))
    assert list(order.drawn(step * BATCH).values()) == counted(sources, len(mix[1])).tolist()


@unhurried
@given(mixes(), st.integers(1, 300))
def test_a_start_with_the_counts_of_another_order_repeats_none_of_its_windows_in_an_epoch(
    mix, step
):
    """An annealing branch: the parent's mix up to a step, then its own."""
    stages, sizes = mix
    parent = order_of(stages, sizes)
    branch = order_of(
        [MixStage(step, dict.fromkeys(sizes, 1.0))], sizes, drawn_before=parent.drawn(step * BATCH)
    )
    numbers = np.arange(600 * BATCH)
    before, after = numbers[: step * BATCH], numbers[step * BATCH :]
    found = [order.locate(part) for order, part in ((parent, before), (branch, after))]
    sources, draws = (np.concatenate(parts) for parts in zip(*found, strict=True))
    for source in range(len(sizes)):
        mine = draws[sources == source]
        assert mine.tolist() == list(range(len(mine)))


def test_a_source_keeps_its_order_when_another_one_is_added():
    numbers = np.arange(4000, dtype=np.uint64)
    alone = order_of([MixStage(0, {"b": 1})], {"b": 300})
    both = order_of([MixStage(0, {"a": 1, "b": 1})], {"a": 70, "b": 300})
    found = both.windows(numbers)
    of_b = found[found >= 70] - 70
    assert np.array_equal(of_b, alone.windows(numbers)[: len(of_b)])


def test_sources_are_shuffled_within_a_batch():
    order = order_of([MixStage(0, {"a": 1, "b": 1})], {"a": 9, "b": 9}, batch=1024)
    sources, _ = order.locate(np.arange(1024))
    assert counted(sources, 2).tolist() == [512, 512]
    assert 400 < np.count_nonzero(np.diff(sources)) < 624  # 512 by chance, with a deviation of 16


def test_every_batch_has_the_weights_and_a_stage_begins_with_its_step():
    order = order_of(
        [MixStage(0, {"a": 1, "b": 3}), MixStage(5, {"a": 3, "b": 1})], {"a": 50, "b": 50}
    )
    sources, _ = order.locate(np.arange(80).reshape(10, BATCH))
    assert [np.count_nonzero(batch == 0) for batch in sources] == [2] * 5 + [6] * 5


def test_seeds_have_orders_of_their_own():
    numbers = np.arange(200, dtype=np.uint64)
    stages, sizes = [MixStage(0, {"a": 1, "b": 1})], {"a": 300, "b": 300}
    orders = {order_of(stages, sizes, seed=seed).windows(numbers).tobytes() for seed in range(4)}
    assert len(orders) == 4


def test_order_of_a_seed_never_changes_between_versions():
    stages = [MixStage(0, {"code": 0.3, "web": 0.7}), MixStage(1, {"code": 7, "web": 3})]
    order = order_of(stages, {"code": 100, "web": 200}, seed=7)
    assert order.windows(np.arange(16, dtype=np.uint64)).tolist() == RECORDED


RECORDED = [207, 64, 189, 243, 52, 182, 102, 245, 90, 77, 164, 293, 185, 37, 11, 46]


def test_a_share_that_is_small_has_larger_blocks_and_one_that_is_too_small_is_refused():
    assert order_of([MixStage(0, {"a": 1, "b": 9999})], {"a": 5, "b": 5}).largest_block == 2**15
    with pytest.raises(ConfigError, match=r"source a has 1e-06 of the samples") as refused:
        order_of([MixStage(0, {"a": 1, "b": 999_999})], {"a": 1, "b": 999_999})
    assert "set train.mix" in refused.value.fix


# --- batches --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Windows of two sources, and their number by source; each token names its place."""
    folder = tmp_path_factory.mktemp("shards")
    shards = []
    for number, length in enumerate((401, 1201)):
        path = folder / f"{number}.bin"
        (np.arange(length) + 10_000 * number).astype(np.uint16).tofile(path)
        shards.append(Shard(path, length, np.dtype("<u2")))
    return Windows(shards, 10), {"a": 40, "b": 120}


@unhurried
@given(
    world_size=st.sampled_from([1, 2, 3, 6, 12]),
    step=st.integers(0, 10**9),
    weight=st.integers(0, 30),
)
def test_batch_is_the_same_on_any_world_size_from_any_step(sources, world_size, step, weight):
    windows, sizes = sources
    stages = [MixStage(0, {"a": weight, "b": 10}), MixStage(step, {"a": 1, "b": 1})]

    def batch(rank, world_size, first=step):
        loader = Loader(
            windows,
            seed=1,
            batch_size=12,
            rank=rank,
            world_size=world_size,
            mixed=order_of(stages, sizes, batch=12),
        )
        loader.batch(max(0, first))  # what it has computed ahead must not matter
        return loader.batch(step)[0]

    alone = batch(0, 1)
    parts = [batch(rank, world_size, first=step - 2) for rank in range(world_size)]
    assert torch.equal(torch.cat(parts), alone)
    assert np.count_nonzero(alone[:, 0] < 10_000) == 6


def test_source_without_a_whole_window_is_named(tmp_path):
    (tmp_path / "0.bin").write_bytes(bytes(20))
    short = Shard(tmp_path / "0.bin", 10, np.dtype("<u2"))
    tokens = SimpleNamespace(by_source={"web": SimpleNamespace(val=[short])})
    with pytest.raises(DataError, match="no web val shard holds one sequence"):
        windows_by_source(tokens, "val", 10)
