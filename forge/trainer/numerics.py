"""Numerical settings that decide the last bits of a loss; training and validation set them alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from forge.trainer import cpu

# Samples per rank in a checkpoint's probe: enough to see a wrong weight, cheap in an emergency stop.
PROBE_SAMPLES = 4


def prepare(device: torch.device) -> None:
    """Set this process up for exact and fast arithmetic. Once, before any tensor is computed."""
    # True fp32 on a GPU: TF32 would be a choice for train.precision to make.
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    torch.use_deterministic_algorithms(device.type == "cpu")
    if device.type == "cpu":
        cpu.use_fast_fp32()
        cpu.keep_freed_memory()


def precision(wanted: str | None, device: torch.device) -> str:
    """`fp32` or `bf16`: as wanted, else fp32 on a CPU and bf16 on a GPU."""
    return wanted or ("fp32" if device.type == "cpu" else "bf16")


def device_name(device: torch.device) -> str:
    """The name of a GPU as its driver gives it; `cpu` for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def numerics(device: torch.device, precision: str) -> dict[str, Any]:
    """What decides the last bits of a loss besides weights and data."""
    return {
        "device": device.type,
        "device_name": device_name(device),
        "precision": precision,
        "threads": torch.get_num_threads(),
        "gpu_products": torch.backends.cuda.matmul.fp32_precision,
        # "onednn": its fp32 kernels, measured to be true fp32 by cpu.use_fast_fp32.
        "cpu_products": "onednn" if cpu.has_fast_fp32() else "default",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def probe_samples(num_samples: int, rank: int) -> np.ndarray[Any, Any]:
    """Numbers of the held-out samples that a rank's probe uses."""
    numbers = np.arange(rank * PROBE_SAMPLES, (rank + 1) * PROBE_SAMPLES)
    return numbers % num_samples
