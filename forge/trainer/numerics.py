"""Numerical settings on which a loss depends bitwise, the same in training and validation; on CPUs oneDNN
for fp32 matrix products, and an allocator that keeps freed memory."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from forge.data.windows import Windows, spread_over_sources

# Samples in the reference batch of a rank: enough to detect a wrong weight, cheap in a stop before the
# time limit.
REFERENCE_SAMPLES = 4

# What torch computes by MKL's vector functions, as its header ATen/cpu/vml.h lists them.
MKL_FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp", "log", "log10", "log2"),
    *("sin", "sqrt", "tan", "tanh", "trunc"),
)


def prepare(device: torch.device, *, deterministic: bool = False) -> None:
    """Set this process up for exact and fast arithmetic. Called once, before any computation.

    deterministic: of train.deterministic, for a GPU.
    """
    # True fp32 on a GPU: TF32 would have to be a value of train.precision.
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    torch.use_deterministic_algorithms(deterministic or device.type == "cpu")
    if deterministic and device.type == "cuda":
        # cuBLAS reads it when it makes its first handle (docs, "Results Reproducibility").
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # The compiler then chooses kernels without timing them; read when it is imported.
        os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
        # Every allocation would be filled with NaN, against reading memory that was never written.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    call_each_mkl_function()
    if device.type == "cpu":
        use_fast_fp32()
        keep_freed_memory()


def precision(wanted: str | None, device: torch.device) -> str:
    """`fp32` or `bf16`: the value of train.precision, else fp32 on a CPU and bf16 on a GPU."""
    return wanted or ("fp32" if device.type == "cpu" else "bf16")


def device_name(device: torch.device) -> str:
    """The name of a GPU as its driver gives it; `cpu` for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def numerics(device: torch.device, precision: str) -> dict[str, Any]:
    """Everything besides weights and data that a loss depends on bitwise."""
    return {
        "device": device.type,
        "device_name": device_name(device),
        "precision": precision,
        "threads": torch.get_num_threads(),
        "gpu_products": torch.backends.cuda.matmul.fp32_precision,
        # "onednn" where cpu.use_fast_fp32 has measured that its products are true fp32.
        "cpu_products": "onednn" if has_fast_fp32() else "default",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def reference_batch(windows: Mapping[str, Windows], rank: int) -> np.ndarray[Any, Any]:
    """The validation windows in a rank's reference batch, of all sources in turn, int64
    [REFERENCE_SAMPLES, seq_len + 1]."""
    numbers = np.arange(rank * REFERENCE_SAMPLES, (rank + 1) * REFERENCE_SAMPLES)
    return spread_over_sources(windows, numbers)


def call_each_mkl_function() -> None:
    """Call each vector function of MKL once from one thread, before several threads call it.

    MKL 2024.2, which torch 2.13 has, chooses a function's kernel in the first call. If two threads make
    that call at once, one may run a kernel of low accuracy on its part of the tensor (cos with an error
    of 1.5e-4 instead of 4e-8; https://github.com/pytorch/pytorch/issues/188792): the first step of a
    process, or the check of a valid checkpoint, would differ from one process to the next.
    """
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype)  # one element: by the calling thread alone
        for name in MKL_FUNCTIONS:
            getattr(one, name)()


def use_fast_fp32() -> bool:
    """Use oneDNN for fp32 products on the CPU if it computes in true fp32 here; returns whether.

    torch uses oneDNN's AVX-512 kernels, faster than MKL's on AMD, only with a setting that also
    allows bf16, which AMX would use. So the error of one product is measured, and the setting is
    undone if the error is larger than in fp32. Every process calls this once, before training or
    validation, so that both round in the same way.
    """
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    default, matmul.fp32_precision = matmul.fp32_precision, "bf16"
    if product_error() < 1e-5:
        return True
    matmul.fp32_precision = default
    return False


def has_fast_fp32() -> bool:
    """Return whether `use_fast_fp32` has switched this process to oneDNN."""
    return torch.backends.mkldnn.matmul.fp32_precision == "bf16"  # type: ignore[attr-defined]


def product_error() -> float:
    """Relative error of an fp32 matrix product on the CPU: 3e-7 in true fp32, 3e-3 in bf16."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(512, 512, generator=generator) for _ in range(2))
    exact = left.double() @ right.double()
    return float(((left @ right).double() - exact).norm() / exact.norm())


def keep_freed_memory() -> bool:
    """Let this process keep the memory that tensors on the CPU free; False where libc is not glibc.

    By default glibc returns large blocks to the kernel at once, and every step page-faults them in
    again: 10 % of a step in fp32, 20 % in bf16. The process stays as large as its peak. Called once,
    by processes that train on the CPU.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    m_trim_threshold, m_mmap_max = -1, -4  # from malloc.h
    # no block from mmap, and a heap that is never trimmed (-1)
    return mallopt is not None and bool(mallopt(m_mmap_max, 0) and mallopt(m_trim_threshold, -1))
