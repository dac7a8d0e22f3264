"""Errors of a GPU as torch reports them: broken hardware, or the program's own mistake? No torch."""

from __future__ import annotations

import re

# Causes in rank records. After both, ranks are launched again; after a fault without the node.
FAULT = "GPU fault"
ERROR = "GPU error"
OUT_OF_MEMORY = "out of memory"

# Words of cudaGetErrorString (CUDA Runtime API, "Error Handling") for what only hardware or driver cause.
_OF_HARDWARE = re.compile(
    r"ECC|NVLink|hardware stack|fallen off the bus|busy or unavailable|no CUDA-capable device"
    r"|not yet initialized|initialization error|unknown error|driver shutting down|GPU is lost"
)
# What a bad kernel and a bad GPU cause alike. Another GPU tells them apart.
_OF_EITHER = re.compile(
    r"illegal memory access|illegal instruction|misaligned address|unspecified launch failure"
    r"|invalid program counter|launch timed out|EXECUTION_FAILED|INTERNAL_ERROR"
)
_OF_GPU = re.compile(r"CUDA error: |(CUDNN|CUBLAS|CUSOLVER)_STATUS_")


def cause_of(error: BaseException) -> str:
    """FAULT, ERROR or OUT_OF_MEMORY for such an error of a GPU; "" for any other, a device-side assert
    among them: an index out of range fails on every GPU."""
    text = str(error)
    if type(error).__name__ == "OutOfMemoryError":  # torch's, for a GPU
        return OUT_OF_MEMORY
    if not isinstance(error, RuntimeError) or not _OF_GPU.search(text):
        return ""
    if _OF_HARDWARE.search(text):
        return FAULT
    return ERROR if _OF_EITHER.search(text) else ""


def first_line(error: BaseException) -> str:
    """First line of an error's message, without torch's advice on debugging."""
    return str(error).strip().partition("\n")[0]
