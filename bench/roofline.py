"""What a GPU can do, measured, and the least time that the products of a training step take on it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from bench.contenders.sizes import Sizes

BYTES = 2  # of a number in bf16


class Rates(NamedTuple):
    """FLOP/s of a large bf16 product, and bytes/s of a large copy, read and written."""

    flops: float
    bytes: float


def measure(device: torch.device, *, quick: bool) -> Rates:
    """Best of ten, as in tests/gpu/test_machine.py: matrices of 8192 x 8192, random; a copy of 4 GiB."""
    size, numbers = (512, 2**20) if quick else (8192, 2**30)
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(numbers, device=device)
    target = torch.empty_like(source)
    flops = 2 * size**3 / _best(lambda: left @ right, device)
    return Rates(flops, 2 * source.nbytes / _best(lambda: target.copy_(source), device))


def _best(action: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of ten, after two that warm up."""
    found = []
    for _ in range(12):
        synchronize(device)
        started = time.perf_counter()
        action()
        synchronize(device)
        found.append(time.perf_counter() - started)
    return min(found[2:])


def synchronize(device: torch.device) -> None:
    """Wait for all work on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def floor_seconds(sizes: Sizes, rates: Rates) -> float:
    """The roofline of a step (Williams et al. 2009, doi:10.1145/1498765.1498785): the sum over its matrix
    products, forward and backward, of the larger of FLOPs / rate and bytes / bandwidth.

    Without norms, optimizer, recomputation and collectives: no step can be as fast. Attention counts as a
    causal kernel computes it, half of the products, while MFU counts it whole.
    """
    parts = (*_products(sizes), *_attention(sizes))
    return sum(max(flops / rates.flops, moved / rates.bytes) for flops, moved in parts)


def _products(sizes: Sizes) -> Iterator[tuple[float, float]]:
    """FLOPs and bytes of products with weights: forward, and backward by the input and by the weight."""
    shape, tokens = sizes.model, sizes.tokens
    kv_dim = shape.num_kv_heads * shape.dim // shape.heads
    weights = [(shape.dim, shape.dim)] * 2 + [(shape.dim, kv_dim)] * 2
    weights += [(shape.dim, shape.inner_dim)] * 3
    for rows, columns in (*weights * shape.layers, (shape.dim, sizes.vocab_size)):
        moved = BYTES * (tokens * rows + rows * columns + tokens * columns)
        yield from [(2.0 * tokens * rows * columns, moved)] * 3


def _attention(sizes: Sizes) -> Iterator[tuple[float, float]]:
    """FLOPs and bytes of each attention: 2 products forward, 5 backward, since a fused kernel computes
    the scores again (Dao 2023, arXiv:2307.08691, section 3.1); half of each, since it is causal."""
    shape, tokens = sizes.model, sizes.tokens
    kv_dim = shape.num_kv_heads * shape.dim // shape.heads
    product = 2.0 * tokens * sizes.seq_len * shape.dim / 2
    for _ in range(shape.layers):
        yield 2 * product, BYTES * tokens * (2 * shape.dim + 2 * kv_dim)
        yield 5 * product, BYTES * tokens * (4 * shape.dim + 4 * kv_dim)


def clocks(device: torch.device) -> str:
    """Clocks, power, temperature of a GPU now, from nvidia-smi; "" where it fails, and on a CPU."""
    if device.type != "cuda":
        return ""
    uuid = torch.cuda.get_device_properties(device).uuid
    fields = "clocks.sm,clocks.mem,power.draw,temperature.gpu"
    command = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return f"{done.stdout.strip()} C" if done.returncode == 0 else ""
