"""A fake NVML: GPUs that answer in place of the functions of nvidia-ml-py, under their real names."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

UNSUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED


@dataclass
class FakeGpu:
    """What a GPU answers; an int of NVML_ERROR_… in `errors` in place of the answer of a function."""

    name: str = "NVIDIA H100 80GB HBM3"
    uuid: str = "GPU-0"
    ecc: list[int] = field(default_factory=lambda: [0])  # of one reading after another
    remapped: tuple[int, int, int, int] = (0, 0, 0, 0)
    reasons: list[int] = field(default_factory=lambda: [1])  # of one reading after another
    lanes: tuple[int, int] = (16, 16)
    used_mib: int = 4
    pids: tuple[int, ...] = ()
    percent: int = 97
    watts: float = 650.0
    celsius: int = 61
    errors: dict[str, int] = field(default_factory=dict)

    def answers(self) -> dict[str, Any]:
        return {
            "Name": self.name,
            "TotalEccErrors": self.ecc[0],
            "RemappedRows": self.remapped,
            "CurrentClocksThrottleReasons": self.reasons[0],
            "CurrPcieLinkWidth": self.lanes[0],
            "MaxPcieLinkWidth": self.lanes[1],
            "MemoryInfo": SimpleNamespace(used=self.used_mib * 2**20),
            "ComputeRunningProcesses": [SimpleNamespace(pid=pid) for pid in self.pids],
            "UtilizationRates": SimpleNamespace(gpu=self.percent),
            "PowerUsage": round(1000 * self.watts),
            "Temperature": self.celsius,
        }


def raises(code: int) -> None:
    raise pynvml.NVMLError(code)


def install(monkeypatch, *gpus: FakeGpu) -> None:
    """Let NVML have these GPUs, in the order of their indices."""

    def by_index(index: int) -> FakeGpu:
        return gpus[index] if index < len(gpus) else raises(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    def by_uuid(uuid: str) -> FakeGpu:
        found = [gpu for gpu in gpus if gpu.uuid == uuid]
        return found[0] if found else raises(pynvml.NVML_ERROR_NOT_FOUND)

    def answer(what: str):
        def asked(gpu: FakeGpu, *_: Any) -> Any:
            value = raises(gpu.errors[what]) if what in gpu.errors else gpu.answers()[what]
            if "Clocks" in what:
                del gpu.reasons[: len(gpu.reasons) > 1]
            if "Ecc" in what:
                del gpu.ecc[: len(gpu.ecc) > 1]
            return value

        return asked

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    functions = {f"nvmlDeviceGet{what}": answer(what) for what in FakeGpu().answers()}
    functions |= {"nvmlInit": lambda: None, "nvmlShutdown": lambda: None}
    functions |= {"nvmlDeviceGetCount": lambda: len(gpus)}
    functions |= {"nvmlDeviceGetHandleByIndex": by_index, "nvmlDeviceGetHandleByUUID": by_uuid}
    for name, function in functions.items():
        monkeypatch.setattr(pynvml, name, function)  # fails for a name that pynvml does not have
