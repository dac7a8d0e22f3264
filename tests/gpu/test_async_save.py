"""Against a checkpoint of two steps at once, and against saves that stop training: the state is copied
from the device into pinned memory while its weights are about to change.
"""

from __future__ import annotations

import statistics

import pytest
import torch
from support.gpu import full, make_step, seconds_of

from bench.manifests import manifest_of
from forge.checkpoint.async_saver import Saver
from forge.checkpoint.storage import training_state
from forge.core.models.llama import Llama
from forge.core.paths import RunPaths
from forge.core.train_settings import Train

# Of the time of copies to pinned memory, one for each tensor: the rest is Python's, tensor by tensor.
MAX_STALL = 1.3
SAVES = 4


@pytest.fixture
def step(world):
    """A training step that was called three times. On a GPU its state is 1.4 GB in 80 tensors, large as
    those of a large model."""
    on_gpu = world.device.type == "cuda"
    model = Llama(dim=2048, layers=2, heads=16) if on_gpu else Llama(dim=64, layers=2, heads=2)
    step = make_step(world, model, Train(seq_len=64, batch_size=4), 8192, "bf16")
    for number in range(3):
        step(number)
    return step


def state_of(step):
    return training_state(step.parallel.decoder, step.optimizers)


def saver_of(world, folder, *, async_save):
    return Saver(world, RunPaths(folder), async_save=async_save, check_may_write=lambda: None)


def tensors_of(state):
    parts = (*state["optimizer"].values(), state["model"])
    return [full(tensor) for tensors in parts for tensor in tensors.values()]


def digests_of(save):
    """Of each file of tensors; the index also holds the path of its directory."""
    files = save.checkpoint.manifest.files
    found = {name: file.digest for name, file in files.items() if name.endswith(".distcp")}
    assert found
    return found


def test_save_during_five_steps_has_the_bytes_of_a_blocking_save(world, step, tmp_path, measured):
    blocking = saver_of(world, tmp_path / "blocking", async_save=False)
    blocking.start(state_of(step), manifest_of(3), keep_last=1)
    expected = blocking.finish()
    saver = saver_of(world, tmp_path / "async", async_save=True)
    saver.hold_updates(step.optimizers)
    saver.start(state_of(step), manifest_of(3), keep_last=1)
    for number in range(3, 8):
        step(number)
    found = saver.finish()
    assert saver.async_save
    measured("MB", expected.size / 1e6)
    assert digests_of(found) == digests_of(expected)


def test_later_saves_stop_training_for_little_more_than_the_pinned_copy(
    gpu, world, step, tmp_path, measured
):
    saver = saver_of(world, tmp_path, async_save=True)
    stalls = []
    for number in range(SAVES):
        state = state_of(step)
        torch.cuda.synchronize(gpu)  # not the wait for steps, but the save alone
        stalls.append(saver.start(state, manifest_of(3 + number), keep_last=1).stall)
        saver.finish()
    pairs = [(t, torch.empty_like(t, device="cpu", pin_memory=True)) for t in tensors_of(state)]

    def copy():
        for tensor, target in pairs:
            target.copy_(tensor, non_blocking=True)

    copies = [seconds_of(copy, gpu) for _ in range(SAVES)]
    pinned, stall = statistics.median(copies[1:]), statistics.median(stalls[1:])
    measured("first stall ms", 1e3 * stalls[0])
    measured("stall ms", 1e3 * stall)
    measured("pinned copy ms", 1e3 * pinned)
    measured("ratio", stall / pinned)
    assert stall <= MAX_STALL * pinned
