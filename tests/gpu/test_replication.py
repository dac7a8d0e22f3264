"""Against copies that FSDP2 keeps in bf16 with other gradients than autocast, or at the price of time."""

from __future__ import annotations

import pytest
import torch
from support.gpu import full, make_step, relative_error, seconds_of

from forge.core.models.llama import Llama
from forge.core.train_settings import Train
from forge.trainer import transforms

LIMIT = 2e-2  # bf16 has 8 bits, and autocast keeps fp32 between blocks: 6e-3 measured on CPUs


def sizes(device):
    if device.type == "cuda":
        return Llama(dim=1024, layers=6, heads=16), Train(seq_len=1024, batch_size=8), 32000
    return Llama(dim=64, layers=2, heads=2), Train(seq_len=64, batch_size=4), 512


@pytest.fixture
def step_of(world, monkeypatch):
    """A training step whose model FSDP2 keeps, or autocast."""

    def step_of(by_fsdp2):
        monkeypatch.setattr(transforms, "replicates", lambda *_: by_fsdp2)
        return make_step(world, *sizes(world.device), "bf16")

    return step_of


def test_gradients_are_those_of_autocast_and_the_time_is_recorded(step_of, world, measured):
    grads = {}
    for name, by_fsdp2 in {"autocast": False, "fsdp2": True}.items():
        step = step_of(by_fsdp2)
        step.parallel.backward(*step.loader.batch(0))
        grads[name] = torch.cat(
            [full(p.grad).flatten() for p in step.parallel.decoder.parameters()]
        )
        step.parallel.decoder.zero_grad(set_to_none=True)
        times = [seconds_of(lambda step=step: step(0), world.device) for _ in range(4)]
        measured(f"{name} ms", 1e3 * min(times))
    error = relative_error(grads["fsdp2"], grads["autocast"])
    measured("error of gradients", error)
    assert error <= LIMIT
