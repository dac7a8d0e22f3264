"""Against documents that see each other in the kernel of a GPU, which is not the one that CPUs run."""

from __future__ import annotations

import pytest
import torch
from support.gpu import full, make_step, relative_error, seconds_of
from torch._dynamo.utils import counters

from forge.core.models.llama import Llama
from forge.core.train_settings import Train

VOCAB = 64  # token 0 ends a document: 64 tokens each
SAME = 2e-2  # bf16 has 8 bits


def gradients(world, model, precision, **settings):
    """Loss and gradients of one batch with a document mask."""
    train = Train(seq_len=128, batch_size=2, document_mask=True, **settings)
    step = make_step(world, model, train, VOCAB, precision)
    loss = float(step.parallel.backward(*step.loader.batch(0)))
    grads = [full(p.grad).flatten().cpu() for p in step.parallel.decoder.parameters()]
    return loss, torch.cat(grads)


def errors(one, other):
    return max(abs(one[0] - other[0]) / other[0], relative_error(one[1], other[1]))


@pytest.mark.parametrize("kv_heads", [None, 2], ids=["all heads", "grouped heads"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_masked_step_in_bf16_is_near_the_mask_in_fp32(world, measured, kv_heads, recompute):
    model = Llama(dim=256, layers=2, heads=4, kv_heads=kv_heads)
    fast = gradients(world, model, "bf16", recompute=recompute)
    error = errors(fast, gradients(world, model, "fp32"))
    measured("error", error)
    assert error <= SAME


def test_masked_step_is_compiled_and_near_the_one_that_is_not(gpu, world, measured, capfd):
    torch._dynamo.reset()
    model = Llama(dim=256, layers=2, heads=4)
    compiled = gradients(world, model, "bf16", compile=True)
    assert "without torch.compile" not in capfd.readouterr().err
    measured("graphs", counters["stats"]["unique_graphs"])
    torch._dynamo.reset()
    error = errors(compiled, gradients(world, model, "bf16"))
    measured("error", error)
    assert error <= SAME


def test_speed_of_a_masked_step_is_recorded(gpu, world, measured):
    """At a length at which attention is a quarter of a step; a mask of all pairs would be most of it."""
    model = Llama(dim=1024, layers=4, heads=16)
    for name, mask in (("masked ms", True), ("plain ms", False)):
        torch._dynamo.reset()
        train = Train(seq_len=4096, batch_size=4, document_mask=mask, compile=True)
        step = make_step(world, model, train, VOCAB, "bf16")

        def take(number, step=step):
            step(number).read()

        seconds = [seconds_of(lambda n=number: take(n), gpu) for number in range(12)]
        measured(name, 1e3 * min(seconds[2:]))
