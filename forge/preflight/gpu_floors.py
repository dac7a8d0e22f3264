"""Speeds that a GPU has when nothing is wrong with it, by its name, well below those of good ones."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class GpuFloors:
    """FLOP/s and bytes/s; None where no number is known."""

    bf16: float | None = None  # product of two matrices of 8192 x 8192 random numbers
    copy: float | None = None  # within its memory, read and written
    host_copy: float | None = (
        None  # from pinned memory of the host, while the other GPUs do the same
    )
    all_reduce: float | None = None  # bus bandwidth of 16 MiB between GPUs of one node


NOT_KNOWN = GpuFloors()
# Longer names first.
# bf16 and copy: 0.75 to 0.85 of what good ones reach (H100, H200: 800 TFLOP/s; 3.0 and 4.3 TB/s). A100:
#   0.64 of the 312 TFLOP/s of its data sheet, where the H100 has 0.61.
# host_copy: a quarter of what one reaches alone (53 and 25 GB/s: issues 24 and 42 of NVIDIA/nvbandwidth),
#   since several may share a switch.
# all_reduce: above the 26 GB/s of PCIe 4.0 between GPUs without NVLink (issue 50 there).
FLOORS = {
    "H100 PCIe": NOT_KNOWN,
    "H100 NVL": NOT_KNOWN,
    "H200 NVL": NOT_KNOWN,
    "H100": GpuFloors(600e12, 2.5e12, 13e9, 30e9),
    "H200": GpuFloors(600e12, 3.5e12, 13e9, 30e9),
    "A100-SXM4": GpuFloors(200e12, None, 6e9, 30e9),
}


def floors_of(name: str) -> GpuFloors:
    """The floors of the GPU with this name. Of a MIG slice nothing is known."""
    if re.search(r"\bMIG\b", name):
        return NOT_KNOWN
    found = (known for part, known in FLOORS.items() if re.search(rf"\b{part}\b", name))
    return next(found, NOT_KNOWN)
