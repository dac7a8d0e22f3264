"""Against an output layer that is fast and slightly wrong: fused kernels, chunks and bf16 change rounding
on a GPU, and the loss would still go down.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.gpu import relative_error, seconds_of

import forge.trainer.loss
from forge.trainer.loss import linear_cross_entropy

# fp32 sums of a thousand products agree to 1e-6, bf16 has 8 bits: 4e-3 for each rounded number.
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def sizes(device):
    """Tokens, width, vocabulary: with more than one chunk, the last one shorter."""
    return (4097, 1024, 50304) if device.type == "cuda" else (97, 64, 1009)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", LIMITS, ids=["fp32", "bf16"])
def test_loss_and_gradients_are_those_of_fp64(device, measured, monkeypatch, dtype, compiled):
    num_tokens, width, vocab_size = sizes(device)
    monkeypatch.setattr(forge.trainer.loss, "LOGITS_BYTES_CPU", 4 * vocab_size * 40)
    torch.manual_seed(0)
    hidden = torch.randn(num_tokens, width, device=device).to(dtype)
    weight = (0.05 * torch.randn(vocab_size, width, device=device)).to(dtype)
    targets = torch.randint(vocab_size, (num_tokens,), device=device)
    exact = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    expected = F.cross_entropy(exact[0] @ exact[1].T, targets)
    expected.backward()
    found = [tensor.requires_grad_() for tensor in (hidden, weight)]
    loss = linear_cross_entropy(*found, targets, compiled=compiled)
    loss.backward()
    errors = {"loss": relative_error(loss.detach(), expected.detach())}
    for name, ours, theirs in zip(("hidden", "weight"), found, exact, strict=True):
        errors[name] = relative_error(ours.grad, theirs.grad)
    for name, error in errors.items():
        measured(f"error of {name}", error)
    assert max(errors.values()) <= LIMITS[dtype]


def test_compiled_loss_is_faster_than_the_eager_one(gpu, measured):
    hidden = torch.randn(8192, 1024, device=gpu, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(50304, 1024, device=gpu, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(50304, (8192,), device=gpu)
    seconds = {}
    for compiled in (False, True):
        run = partial(linear_cross_entropy, hidden, weight, targets, compiled=compiled)
        run()
        seconds[compiled] = min(seconds_of(run, gpu) for _ in range(10))
    measured("eager ms", 1e3 * seconds[False])
    measured("compiled ms", 1e3 * seconds[True])
    assert seconds[True] < seconds[False]
