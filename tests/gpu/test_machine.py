"""Against numbers that say nothing: of a GPU that is slow itself (throttled, shared, a slice), or of
kernels that are compiled while they are measured because torch has none for this GPU.
"""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch
from support.gpu import seconds_of

from forge.preflight.gpu_floors import floors_of

SIZE = 8192


def best_seconds(action, gpu):
    """Of ten, after two that warm up: the floor is for what the GPU can do, not what it usually does."""
    return min([seconds_of(action, gpu) for _ in range(12)][2:])


def test_torch_has_kernels_for_this_gpu(gpu, measured):
    major, minor = torch.cuda.get_device_capability(gpu)
    measured("GPU", torch.cuda.get_device_name(gpu))
    measured("Python", platform.python_version())
    for name in ("torch", "numpy", "transformers", "triton"):
        try:
            measured(name, version(name))
        except PackageNotFoundError:
            measured(name, "none")
    measured("CUDA", torch.version.cuda)
    measured("cuDNN", torch.backends.cudnn.version())
    measured("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    # Kernels of the same major number run too.
    assert any(name.startswith(f"sm_{major}") for name in torch.cuda.get_arch_list()), (
        major,
        minor,
    )


def test_bf16_products_are_as_fast_as_this_gpu_is_known_to_be(gpu, measured):
    left, right = (torch.randn(SIZE, SIZE, device=gpu, dtype=torch.bfloat16) for _ in range(2))
    rate = 2 * SIZE**3 / best_seconds(lambda: left @ right, gpu)
    measured("TFLOP/s", rate / 1e12)
    known = floors_of(torch.cuda.get_device_name(gpu))
    assert known.bf16 is None or rate >= known.bf16


def test_copies_are_as_fast_as_this_gpu_is_known_to_be(gpu, measured):
    source = torch.empty(2**30, device=gpu, dtype=torch.float32)
    target = torch.empty_like(source)
    rate = 2 * source.nbytes / best_seconds(lambda: target.copy_(source), gpu)
    measured("TB/s", rate / 1e12)
    known = floors_of(torch.cuda.get_device_name(gpu))
    assert known.copy is None or rate >= known.copy


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("NVIDIA H100 80GB HBM3", 600e12),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ],
)
def test_floors_are_those_of_the_named_gpu(name, flops):
    assert floors_of(name).bf16 == flops
