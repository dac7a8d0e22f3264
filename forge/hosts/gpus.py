"""NVIDIA GPUs of this node as NVML shows them to a user without root: health, and load.

None stands for what is not known: not every GPU, driver and site answers every question. What the numbers
mean: NVIDIA, "NVML API Reference Guide", Device Queries.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from forge.core.errors import UnfitError

try:
    import pynvml
except ImportError:  # `make gpu` runs with the packages of the machine
    pynvml = None

# Bits of nvmlClocksEventReasons. The first three reduce the clocks by a factor of 2 or more.
SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x40: "hardware slowdown: too hot",
    0x80: "hardware slowdown: power brake of the power supply",
}
WARM = {0x20: "software slowdown: hot"}


class GpuLost(Exception):
    """A GPU that the driver lists and that answers no more."""


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a MIG slice of one, that this process may use. Each property asks NVML again, and raises
    GpuLost."""

    number: int  # as CUDA counts those that this process may use
    word: str  # of CUDA_VISIBLE_DEVICES: an index or a UUID

    def handle(self) -> Any:
        """Raises NVMLError where this process may not use it."""
        if self.word.isdecimal():
            return pynvml.nvmlDeviceGetHandleByIndex(int(self.word))
        return pynvml.nvmlDeviceGetHandleByUUID(self.word)

    def ask(self, question: str, *arguments: Any) -> Any:
        """The answer of a function of NVML; None where there is none."""
        try:
            return getattr(pynvml, question)(self.handle(), *arguments)
        except pynvml.NVMLError as err:
            if _is_lost(err):
                raise GpuLost(f"GPU {self.number}: {err}") from None
            return None

    @property
    def name(self) -> str:
        return str(self.ask("nvmlDeviceGetName") or "")

    @property
    def uncorrected_errors(self) -> int | None:
        """Errors of its memory that ECC could not correct, since the driver was loaded."""
        kinds = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
        count: int | None = self.ask("nvmlDeviceGetTotalEccErrors", *kinds)
        return count

    @property
    def remapping(self) -> tuple[bool, bool]:
        """Return whether rows of its memory wait for its next reset to be remapped, and whether that has
        failed. GPUs before A100 have none."""
        _, _, waits, failed = self.ask("nvmlDeviceGetRemappedRows") or (0, 0, 0, 0)
        return bool(waits), bool(failed)

    @property
    def clock_reasons(self) -> int:
        """Bits of why its clocks are not higher."""
        # Under the name that older drivers have, too.
        return self.ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0

    @property
    def link_width(self) -> tuple[int, int] | None:
        """Lanes of its PCIe link now, and the most that GPU and system can have."""
        now, most = (self.ask(f"nvmlDeviceGet{which}PcieLinkWidth") for which in ("Curr", "Max"))
        return (now, most) if now and most else None

    @property
    def used_mib(self) -> int | None:
        """Memory in use, without what the driver keeps for itself."""
        memory = self.ask("nvmlDeviceGetMemoryInfo", pynvml.nvmlMemory_v2)
        return memory.used // 2**20 if memory else None

    @property
    def pids(self) -> list[int]:
        """Processes that compute on it, also of other users."""
        return [each.pid for each in self.ask("nvmlDeviceGetComputeRunningProcesses") or []]

    @property
    def percent(self) -> int | None:
        """Share of the last second, or less, in which a kernel ran."""
        rates = self.ask("nvmlDeviceGetUtilizationRates")
        return rates.gpu if rates else None

    @property
    def watts(self) -> float | None:
        """Power of the whole board."""
        milliwatts = self.ask("nvmlDeviceGetPowerUsage")
        return None if milliwatts is None else milliwatts / 1000

    @property
    def celsius(self) -> int | None:
        degrees: int | None = self.ask("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU)
        return degrees


def _is_lost(err: Any) -> bool:
    return err.value in (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED)


@contextmanager
def visible_gpus(*, of_job: bool = False) -> Iterator[list[Gpu]]:
    """The GPUs that this process may use; none without a driver, NVML or its package. of_job: those of
    the job on this node, where Slurm says which, though this process was bound to one of them. Raises
    UnfitError where the driver does not answer."""
    if not _begin():
        yield []
        return
    try:
        words = _words_of_job() if of_job else None
        yield list(_visible(os.environ.get("CUDA_VISIBLE_DEVICES") if words is None else words))
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _begin() -> bool:
    if pynvml is None:
        return False
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as err:
        if err.value in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED):
            return False
        raise UnfitError(
            f"the NVIDIA driver does not answer: {err}", fix="see nvidia-smi there"
        ) from None
    return True


def _words_of_job() -> str | None:
    """Indices of the job's GPUs, as NVML counts; None where Slurm does not say. Slurm's are those of the
    node (sbatch(1), SLURM_JOB_GPUS); in a cgroup NVML begins at 0."""
    indices = os.environ.get("SLURM_STEP_GPUS") or os.environ.get("SLURM_JOB_GPUS") or ""
    if not re.fullmatch(r"\d+(,\d+)*", indices):
        return None
    count = pynvml.nvmlDeviceGetCount()
    if max(map(int, indices.split(","))) < count:
        return indices
    return ",".join(map(str, range(count)))


def _visible(names: str | None) -> Iterator[Gpu]:
    """names: as in CUDA_VISIBLE_DEVICES. NVML has only those that the job's cgroup allows, and counts by
    PCI bus, where CUDA begins with the fastest: that is the same where they are alike."""
    words = map(str, range(pynvml.nvmlDeviceGetCount())) if names is None else names.split(",")
    for number, word in enumerate(words):
        gpu = Gpu(number, word.strip())
        try:
            gpu.handle()
        except pynvml.NVMLError as err:
            if not _is_lost(err):
                continue
        yield gpu
