"""CPU settings: oneDNN for fp32 matrix products, and an allocator that keeps freed memory."""

from __future__ import annotations

import ctypes

import torch


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
    """Whether `use_fast_fp32` has switched this process to oneDNN."""
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
