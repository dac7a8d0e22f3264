"""Errors of GPUs, in the words of torch. A broken GPU taken for a bug ends a run that could go on; a bug
taken for a broken GPU excludes one healthy node after the other."""

import pytest

from forge.launch.lost_ranks import (
    GPU_ERROR,
    GPU_FAULT,
    OUT_OF_MEMORY,
    cause_of_gpu_error,
    first_line,
)

ADVICE = "\nCUDA kernel errors might be asynchronously reported at some other API call"


class OutOfMemoryError(RuntimeError):
    """As torch's."""


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("CUDA error: uncorrectable ECC error encountered", GPU_FAULT),
        ("CUDA error: uncorrectable NVLink error detected during the execution", GPU_FAULT),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", GPU_FAULT),
        ("CUDA error: no CUDA-capable device is detected", GPU_FAULT),
        ("CUDA error: unknown error", GPU_FAULT),
        ("CUDA error: an illegal memory access was encountered", GPU_ERROR),
        ("CUDA error: unspecified launch failure", GPU_ERROR),
        ("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", GPU_ERROR),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`", GPU_ERROR),
        ("CUDA error: device-side assert triggered", ""),
        ("CUDA error: no kernel image is available for execution on the device", ""),
        ("CUDA error: invalid argument", ""),
        ("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmul`", ""),
        ("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)", ""),
        ("an ECC memory error is what this text of no GPU is about", ""),
    ],
)
def test_cause_of_an_error(text, cause):
    assert cause_of_gpu_error(RuntimeError(text + ADVICE)) == cause


def test_memory_that_is_used_up_is_no_fault():
    error = OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert cause_of_gpu_error(error) == OUT_OF_MEMORY


def test_an_exception_of_another_kind_is_no_error_of_a_gpu():
    assert cause_of_gpu_error(ValueError("CUDA error: uncorrectable ECC error encountered")) == ""


def test_the_first_line_is_what_people_need():
    error = RuntimeError("CUDA error: unknown error" + ADVICE)
    assert first_line(error) == "CUDA error: unknown error"
