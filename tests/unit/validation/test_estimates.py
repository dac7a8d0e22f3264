"""Against a validation that takes longer than the training: it recomputes a part of what was recorded."""

import itertools

from support.each import hold_for_each

from forge.validation.estimates import (
    CPU_SEC,
    MAX_RECOMPUTED,
    affordable,
    cpu_seconds,
    recomputed_ranks,
)


def check_ranks(world_size):
    ranks = recomputed_ranks(world_size)
    assert len(ranks) == min(world_size, MAX_RECOMPUTED)
    assert (ranks[0], ranks[-1]) == (0, world_size - 1)
    gaps = [after - before for before, after in itertools.pairwise(ranks)]
    assert all(gap >= 1 for gap in gaps)
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_first_and_last_rank_and_others_in_between_are_recomputed():
    sizes = (*range(1, 40), 127, 128, 1000)
    hold_for_each(((f"{size} ranks", size) for size in sizes), check_ranks)


def test_a_smaller_number_is_kept_to():
    assert recomputed_ranks(128, most=1) == [0]
    assert recomputed_ranks(128, most=3) == [0, 63, 127]


def test_a_large_model_on_a_cpu_has_as_many_forward_passes_as_take_minutes():
    """Of 4 samples of 2048 tokens, on 8 cores: all of a small model, some, one."""
    assert affordable(100e6, 4 * 2048, cores=8) > MAX_RECOMPUTED
    number = affordable(1e9, 4 * 2048, cores=8)
    assert 1 < number < MAX_RECOMPUTED
    assert cpu_seconds(1e9, number * 4 * 2048, cores=8) <= CPU_SEC
    assert affordable(70e9, 4 * 2048, cores=8) == 1
