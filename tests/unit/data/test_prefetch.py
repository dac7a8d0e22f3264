"""Against a batch that is not that of its step: the next one is gathered before it is asked for."""

import pytest
import torch
from support import shards

from forge.data.loader import Loader, Prefetcher
from forge.data.windows import Windows


@pytest.fixture
def loader(tmp_path):
    windows = Windows(shards.make(tmp_path).train, 16)
    return Loader(windows, seed=0, batch_size=4, rank=0, world_size=1)


@pytest.fixture
def prefetcher(loader):
    return Prefetcher(loader, torch.device("cpu"))


@pytest.mark.parametrize("steps", [[0, 1, 2, 3], [5, 6, 5, 0, 0, 9]])
def test_each_step_has_the_batch_of_the_loader(steps, loader, prefetcher):
    for step in steps:
        for found, expected in zip(prefetcher.batch(step), loader.batch(step), strict=True):
            assert found.equal(expected) and found.is_contiguous()


def test_next_batch_is_gathered_before_it_is_asked_for(loader, prefetcher):
    asked = []
    batch = loader.batch
    loader.batch = lambda step: asked.append(step) or batch(step)
    prefetcher.batch(3)
    prefetcher.batch(4)  # waits for the thread, which then has begun with step 5
    assert asked[:2] == [3, 4]


def test_error_of_the_thread_is_raised_where_the_batch_is_asked_for(loader, prefetcher):
    def broken(step):
        raise OSError("the disk is gone")

    prefetcher.batch(0)
    loader.batch = broken
    with pytest.raises(OSError, match="the disk is gone"):
        for step in range(1, 4):
            prefetcher.batch(step)
