"""Against a run that is refused, or let through, by a wrong estimate of its memory, and against a
micro-batch that does not fit.
"""

from __future__ import annotations

import gc

import pytest
import torch
from support.gpu import make_step, one_rank, synchronize

from forge.core import memory
from forge.core.memory import Shape
from forge.core.models.llama import Llama
from forge.core.train_settings import Train

MODEL = Llama(dim=2048, layers=6, heads=16, tie_embeddings=False)
VOCAB = 32000
TOLERANCE = 0.10
BATCH = 720  # many divisors: those of 512 are powers of two, of which the largest that fits may fill 44 %


def peak_gib(gpu, world, train):
    """What PyTorch has allocated at the peak of the second step."""
    step = make_step(world, MODEL, train, VOCAB, "bf16")
    for number in range(2):
        torch.cuda.reset_peak_memory_stats(gpu)
        step(number)
        synchronize(gpu)
    return torch.cuda.max_memory_allocated(gpu) / memory.GIB


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_peak_is_the_estimated_one(gpu, world, measured, recompute):
    train = Train(seq_len=2048, batch_size=8, micro_batch_size=4, recompute=recompute)
    found = peak_gib(gpu, world, train)
    expected = memory.estimate(Shape(MODEL, VOCAB, train, 1, 1)).allocated / memory.GIB
    measured("peak GiB", found)
    measured("estimated GiB", expected)
    assert found == pytest.approx(expected, rel=TOLERANCE)


def test_micro_batch_that_is_chosen_fits(gpu, measured):
    """Of a batch that does not fit in one pass."""
    with one_rank(on_gpu=True) as world:
        train = Train(seq_len=2048, batch_size=BATCH)
        step = make_step(world, MODEL, train, VOCAB, "bf16")
        synchronize(gpu)
        assert step.parallel.micro_size < BATCH
        measured("micro-batch", step.parallel.micro_size)
        inputs, targets = (
            tokens[: 2 * step.parallel.micro_size] for tokens in step.loader.batch(0)
        )
        torch.cuda.reset_peak_memory_stats(gpu)
        step.parallel.backward(inputs, targets)
        synchronize(gpu)
    used = torch.cuda.max_memory_allocated(gpu) / torch.cuda.mem_get_info(gpu)[1]
    measured("share of the GPU", used)
    assert used > 0.5
