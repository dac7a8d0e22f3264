"""Against gradients that depend on train.micro_batch_size, which a user lowers until a batch fits."""

from __future__ import annotations

import pytest
import torch
from support.gpu import full, make_step, relative_error

from forge.core.models.llama import Llama
from forge.core.train_settings import Train

MODEL = Llama(dim=256, layers=2, heads=4)
VOCAB = 256
# fp32: another order of sums. bf16: the products of eight batches are rounded apart, to 8 bits each.
LIMITS = {"fp32": 1e-5, "bf16": 2e-2}


def gradients(world, micro, precision):
    """Loss and gradients of the same eight samples."""
    train = Train(seq_len=32, batch_size=8, micro_batch_size=micro)
    step = make_step(world, MODEL, train, VOCAB, precision)
    loss = float(step.parallel.backward(*step.loader.batch(0)))
    grads = [full(p.grad).flatten() for p in step.parallel.decoder.parameters()]
    return loss, torch.cat(grads)


@pytest.mark.parametrize("precision", LIMITS)
def test_eight_micro_batches_of_one_have_the_gradients_of_one_of_eight(world, measured, precision):
    (loss, found), (same, expected) = (gradients(world, micro, precision) for micro in (1, 8))
    error = relative_error(found, expected)
    measured("error of gradients", error)
    measured("error of loss", abs(loss - same) / same)
    assert max(error, abs(loss - same) / same) <= LIMITS[precision]
