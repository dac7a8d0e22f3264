"""Load of a node while it trains: one process a node writes a line every few seconds. No torch.

The first rank of a node starts it, and the kernel ends it with that rank. Nothing waits for it; what goes
wrong with it is a line in the log of the rank.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import psutil
from pydantic import Field

from forge.core import json_lines
from forge.core.errors import UnfitError
from forge.core.paths import RunPaths
from forge.core.process import hostname, stop_with_parent
from forge.core.terminal import one_line, say
from forge.hosts import network
from forge.hosts.gpus import Gpu, GpuLost, visible_gpus
from forge.launch.rank import Rank
from forge.launch.rank_records import LaunchSpec, ProgramTask, TrainTask

NICE = 19  # training goes before

Number = Annotated[float, Field(ge=0, le=1e20)]  # neither NaN nor infinity
OfEachGpu = Annotated[list[Number | None], Field(max_length=64)]  # None: not known


@dataclass(kw_only=True)
class LoadLine:
    """A line of monitor/NODE.jsonl. Bytes: since the interfaces and ports came up."""

    time: Number  # seconds since the epoch
    launch: str
    load: Number  # processes that run or wait for a disk, mean of the last minute
    memory_gib: Number  # in use
    received: Number  # bytes by all network interfaces
    sent: Number
    rdma_received: Number  # bytes by all ports of InfiniBand and RoCE
    rdma_sent: Number
    gpu_percent: OfEachGpu
    gpu_watts: OfEachGpu
    gpu_celsius: OfEachGpu
    gpu_memory_gib: OfEachGpu


def start_monitor(spec: LaunchSpec, rank: Rank) -> None:
    """Start the monitor of this node, if this is its first rank and the ranks train."""
    every_sec = spec.machine.monitor.every_sec
    if rank.local_rank or not every_sec or not isinstance(spec.task, TrainTask | ProgramTask):
        return
    with suppress(OSError):  # the monitor tells
        RunPaths(Path(spec.run)).monitor.mkdir(exist_ok=True)
    module = [sys.executable, "-m", "forge.launch.monitor"]
    arguments = [spec.run, spec.launch, str(every_sec), str(os.getpid())]
    try:
        # A session of its own: signals to the group of the rank are not for it.
        subprocess.Popen([*module, *arguments], stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as err:
        say(f"warning: monitor: {err}; training is not affected")


def main(run: str, launch: str, every_sec: str, parent: str) -> None:
    """Write lines until the rank ends, the disk is full, or the run's directory is gone.

    The rank has made the folder: a monitor that starts after its rank has ended must make nothing, where
    the next command may be removing the run.
    """
    stop_with_parent()
    for number in (
        signal.SIGINT,
        signal.SIGUSR1,
    ):  # for the ranks, where Slurm signals all processes
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICE)
    file = RunPaths(Path(run)).monitor / f"{hostname()}.jsonl"
    with ExitStack() as stack:
        gpus: list[Gpu] = []
        with suppress(UnfitError):  # preflight has told
            gpus = stack.enter_context(visible_gpus(of_job=True))
        while os.getppid() == int(parent) and Path(run).is_dir():
            json_lines.append(file, asdict(node_load(launch, gpus)))
            time.sleep(float(every_sec))


def node_load(launch: str, gpus: Sequence[Gpu]) -> LoadLine:
    """The load of this node now."""
    memory = psutil.virtual_memory()
    received, sent = _network_bytes()
    rdma_received, rdma_sent = network.rdma_bytes()
    used = _of_each(gpus, "used_mib")
    return LoadLine(
        time=round(time.time(), 3),
        launch=launch,
        load=round(psutil.getloadavg()[0], 2),
        memory_gib=round((memory.total - memory.available) / 2**30, 2),
        received=received,
        sent=sent,
        rdma_received=rdma_received,
        rdma_sent=rdma_sent,
        gpu_percent=_of_each(gpus, "percent"),
        gpu_watts=_of_each(gpus, "watts"),
        gpu_celsius=_of_each(gpus, "celsius"),
        gpu_memory_gib=[None if mib is None else round(mib / 1024, 1) for mib in used],
    )


def _of_each(gpus: Sequence[Gpu], name: str) -> list[Any]:
    return [_value(gpu, name) for gpu in gpus]


def _value(gpu: Gpu, name: str) -> Any:
    with suppress(GpuLost):
        return getattr(gpu, name)
    return None


def _network_bytes() -> tuple[int, int]:
    """Received and sent, by interfaces with a device: a bridge or VLAN would count twice. In a container
    none has one."""
    counters = psutil.net_io_counters(pernic=True)
    counters.pop("lo", None)
    devices = [c for n, c in counters.items() if (network.INTERFACES / n / "device").exists()]
    counted = devices or list(counters.values())
    return sum(each.bytes_recv for each in counted), sum(each.bytes_sent for each in counted)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Exception as err:  # a traceback would look like one of the rank
        say(f"warning: monitor: {one_line(str(err))}; training is not affected")
