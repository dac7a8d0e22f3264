"""Against a GPU that waits for Python: each number that a step reads on the host stops the queue of
kernels, and a small model then runs at the speed of Python.
"""

from __future__ import annotations

import math

import pytest
import torch
from support.gpu import make_step

from forge.core.models.llama import Llama
from forge.core.train_settings import Train


@pytest.mark.parametrize("spike", [None, "skip"])
def test_ten_steps_never_wait_for_the_gpu(gpu, world, spike):
    """The result of each is read while the next one runs, as the training loop does."""
    train = Train(seq_len=128, batch_size=8, micro_batch_size=4, spike=spike, spike_window=8)
    step = make_step(world, Llama(dim=256, layers=2, heads=4), train, 1024, "bf16")
    launched = step(0)  # kernels are loaded and memory is allocated
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(1, 11):
            before, launched = launched, step(number, lambda: [0.0, 0.0, 1.0])
            assert math.isfinite(before.read().loss)
    finally:
        torch.cuda.set_sync_debug_mode("default")
