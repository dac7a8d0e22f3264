"""Against a compiled model that is compiled again and again, is not faster, or is silently not used."""

from __future__ import annotations

import statistics
import time

import pytest
import torch
from support.gpu import make_step, seconds_of, synchronize
from torch._dynamo.utils import counters

from forge.core.models.llama import Llama
from forge.core.train_settings import Train

MAX_GRAPHS = 4  # forward with and without gradients, and one more shape of each
# 1.2 on a CPU (bench.train_step). A GPU saves more, where norms, rotary positions and SwiGLU are fused.
MIN_GAIN = 1.10
STEPS = 20


def step_of(world, *, compiled):
    model = Llama(dim=1024, layers=6, heads=16)
    train = Train(seq_len=1024, batch_size=8, compile=compiled)
    return make_step(world, model, train, vocab_size=8192, precision="bf16")


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def test_compiled_model_has_few_graphs_and_is_not_compiled_again(gpu, world, measured, capfd):
    started = time.perf_counter()
    step = step_of(world, compiled=True)
    for number in range(2):
        step(number)
    synchronize(gpu)
    measured("seconds to compile", time.perf_counter() - started)
    graphs = counters["stats"]["unique_graphs"]
    measured("graphs", graphs)
    for number in range(2, 2 + STEPS):
        step(number)
    assert "without torch.compile" not in capfd.readouterr().err
    assert 1 <= graphs <= MAX_GRAPHS
    assert counters["stats"]["unique_graphs"] == graphs


def test_compiled_steps_are_faster_than_eager_ones(gpu, world, measured):
    seconds = {}
    for compiled in (False, True):
        step = step_of(world, compiled=compiled)
        for number in range(3):
            step(number)
        seconds[compiled] = statistics.median(
            seconds_of(lambda step=step, number=number: step(number), gpu)
            for number in range(3, 3 + STEPS)
        )
    measured("eager ms", 1e3 * seconds[False])
    measured("compiled ms", 1e3 * seconds[True])
    measured("gain", seconds[False] / seconds[True])
    assert seconds[False] / seconds[True] >= MIN_GAIN
