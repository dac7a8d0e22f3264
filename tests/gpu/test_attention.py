"""Against attention that silently runs in torch's plain kernel, which is slow and needs memory for all
pairs of tokens: one argument that the fused kernels do not take is enough.
"""

from __future__ import annotations

import re

import pytest
import torch
from support.gpu import make_step
from torch.profiler import ProfilerActivity, profile

from forge.core.models.llama import Llama
from forge.core.train_settings import Train

OPERATOR = re.compile(r"aten::_scaled_dot_product_(\w+?)(?:_for_cpu)?(?:_backward)?")
KERNEL = re.compile(r"flash|cudnn|fmha|efficient", re.IGNORECASE)


def kernels_of(step):
    """Operators of attention in one training step, and the longest fused CUDA kernel ("" on a CPU)."""
    with_gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    step(0)  # the first step also loads kernels
    with profile(activities=[ProfilerActivity.CPU, *with_gpu]) as profiler:
        step(1)
    events = profiler.key_averages()
    operators = {found[1] for event in events if (found := OPERATOR.fullmatch(event.key))}
    kernels = [
        event
        for event in events
        if event.device_type == torch.autograd.DeviceType.CUDA and KERNEL.search(event.key)
    ]
    longest = max(kernels, key=lambda event: event.self_device_time_total, default=None)
    return operators, longest.key if longest else ""


@pytest.mark.parametrize("kv_heads", [None, 2], ids=["all heads", "grouped heads"])
def test_attention_of_a_training_step_runs_in_a_fused_kernel(world, measured, kv_heads):
    model = Llama(dim=256, layers=1, heads=4, kv_heads=kv_heads)  # 64 a head, as in most models
    train = Train(seq_len=128, batch_size=1)
    step = make_step(world, model, train, vocab_size=256, precision="bf16")
    operators, kernel = kernels_of(step)
    measured("operators", ", ".join(sorted(operators)))
    measured("kernel", kernel[:100])
    assert operators
    assert not any("math" in operator for operator in operators)
    assert kernel or world.device.type == "cpu"
