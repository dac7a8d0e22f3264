"""Numerical settings on which a loss depends bitwise; the same in training and validation."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from forge.data.loader import Windows, spread_over_sources
from forge.trainer import cpu

# Samples in the reference batch of a rank: enough to detect a wrong weight, cheap in a stop before the
# time limit.
REFERENCE_SAMPLES = 4


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
        # Every allocation would be filled with NaN, against reading memory that was never written.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device.type == "cpu":
        cpu.use_fast_fp32()
        cpu.keep_freed_memory()


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
        "cpu_products": "onednn" if cpu.has_fast_fp32() else "default",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def reference_batch(windows: Mapping[str, Windows], rank: int) -> np.ndarray[Any, Any]:
    """The validation windows in a rank's reference batch, of all sources in turn, int64
    [REFERENCE_SAMPLES, seq_len + 1]."""
    numbers = np.arange(rank * REFERENCE_SAMPLES, (rank + 1) * REFERENCE_SAMPLES)
    return spread_over_sources(windows, numbers)
