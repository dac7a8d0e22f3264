"""The preflight probe of one rank: its host, device and versions, and whether collectives work fast."""

from __future__ import annotations

import functools
import os
import re
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from forge.core.errors import Exit
from forge.core.process import hostname
from forge.core.provenance import versions
from forge.hosts.network import has_rdma
from forge.launch.lost_ranks import PEER_LOST
from forge.launch.process_group import World
from forge.launch.rank_records import LaunchSpec, PreflightTask, ProbedRank, ProbeResult, RankRecord

LATENCY_ROUNDS = 20
BANDWIDTH_ROUNDS = 3
BANDWIDTH_MIB = 16

PAIR_MIB = 4
PAIR_ROUNDS = 15  # number of other nodes that a node is paired with, at most: enough for a median
MATMUL_SIZE = {"cpu": 768, "cuda": 8192}  # about 20 ms on a core, and on a large GPU
MATMUL_TRIALS = {"cpu": 5, "cuda": 30}  # a GPU raises its clocks within the first of them
COPY_MIB, COPY_TRIALS = 64, 5


class ProbeWatchdog:
    """Ends this rank when a step takes longer than patience_sec, with a record that names the step.

    A timeout of the process group would not do: Gloo restarts it with each piece that arrives.
    """

    def __init__(self, spec: LaunchSpec, rank: int, patience_sec: float) -> None:
        self._spec, self._rank = spec, rank
        self.patience_sec = patience_sec
        self._timer: threading.Timer | None = None

    def begin(self, doing: str) -> None:
        """End the previous step, if any, and begin this step."""
        self.end()
        self._timer = threading.Timer(self.patience_sec, self._end_process, [doing])
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        if self._timer:
            self._timer.cancel()

    def _end_process(self, doing: str) -> None:
        message = f"{doing} took longer than {self.patience_sec:.3g} s"
        record = RankRecord("failed", self._rank, Exit.UNFIT, cause=PEER_LOST, message=message)
        record.write(self._spec)
        os._exit(1)  # the main thread is blocked in a collective


@dataclass(frozen=True)
class Groups:
    """Process groups with a timeout of seconds, where that of training has one of minutes."""

    data: dist.ProcessGroup  # over the backend that training uses
    control: dist.ProcessGroup  # Gloo

    @classmethod
    def of(cls, world: World, patience_sec: float) -> Groups:
        """All ranks call it."""
        patience = timedelta(seconds=patience_sec)
        data = dist.new_group(timeout=patience)
        if world.backend == "gloo":
            return cls(data, data)
        return cls(data, dist.new_group(backend="gloo", timeout=patience))


def check(world: World, task: PreflightTask, spec: LaunchSpec) -> RankRecord:
    """Facts and speeds of all ranks, as the result in the record. All ranks call it.

    A collective that takes longer than task.patience_sec fails.
    """
    # Nothing to save; and no Python handler runs while C++ code blocks the main thread.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    watchdog = ProbeWatchdog(spec, world.rank.rank, task.patience_sec)
    watchdog.begin("connecting to all other ranks")
    groups = Groups.of(world, watchdog.patience_sec)
    speeds = _all_reduce(world, groups, watchdog)
    pairs = _pairs(world, groups, watchdog)
    watchdog.begin("gathering the results of all ranks")
    own = ProbedRank(
        rank=world.rank.rank,
        local_rank=world.rank.local_rank,
        host=hostname(),
        device=str(world.device),
        versions=versions(),
        infiniband=has_rdma(),
        network=_network(task.nccl_file),
        tflop_per_sec=_matmul(world.device),
        pairs=pairs,
        gpu=torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "",
        copy_gb_per_sec=_host_copy(world.device),
    )
    quick = replace(world, control=groups.control)
    result = ProbeResult(
        ranks=[*chain(*quick.gather_objects([own], list[ProbedRank], "results of all ranks"))],
        backend=world.backend,
        interface=os.environ.get("GLOO_SOCKET_IFNAME", ""),
        **speeds,
    )
    world.barrier()
    watchdog.end()
    return RankRecord("completed", world.rank.rank, result=result)


def _network(nccl_file: str) -> str:
    """Delete NCCL_DEBUG_FILE of this process; the network that it names, "" without NCCL."""
    path = Path(nccl_file.replace("%h", hostname()).replace("%p", str(os.getpid())))
    with suppress(FileNotFoundError):
        text = path.read_text(errors="replace")
        path.unlink()
        return network_chosen(text)
    return ""


def network_chosen(log: str) -> str:
    """The network in NCCL_DEBUG=INFO output, such as `IB mlx5_0` or `Socket eth0`; "" if none."""
    match = re.search(r"NET/(\w+) : Using (?:\[\d+\])?([^\s:]+)", log)
    return f"{match.group(1)} {match.group(2)}" if match else ""


def _all_reduce(world: World, groups: Groups, watchdog: ProbeWatchdog) -> dict[str, Any]:
    """Measure an all-reduce: whether the sum is right, latency (median, microseconds), bus bandwidth
    (GB/s).

    Bus bandwidth as in nccl-tests (doc/PERFORMANCE.md): bytes / seconds * 2 (n - 1) / n.
    """
    size = world.rank.world_size
    watchdog.begin("an all-reduce of one number")
    all_reduce = functools.partial(dist.all_reduce, group=groups.data)
    small = torch.full((1,), float(world.rank.rank + 1), device=world.device)
    all_reduce(small)
    right = small.item() == size * (size + 1) / 2
    latency = [_timed(lambda: all_reduce(small)) for _ in range(LATENCY_ROUNDS)]
    watchdog.begin(f"{BANDWIDTH_ROUNDS} all-reduces of {BANDWIDTH_MIB} MiB")
    large = torch.ones(BANDWIDTH_MIB * 2**18, device=world.device)
    seconds = min(_timed(lambda: all_reduce(large)) for _ in range(BANDWIDTH_ROUNDS))
    bus = large.numel() * 4 / seconds * 2 * (size - 1) / size / 1e9
    return {
        "all_reduce_right": right,
        "latency_us": round(statistics.median(latency) * 1e6, 1),
        "bus_gb_per_sec": round(bus, 3),
    }


def _matmul(device: torch.device) -> float:
    """The best of a few products of two square matrices, TFLOP/s (2 n^3 a product); on GPUs in bf16,
    where they have it."""
    size = MATMUL_SIZE[device.type]
    a = torch.rand(size, size, device=device)  # products of equal numbers draw less power
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        a = a.bfloat16()
    seconds = min(_timed(lambda: torch.mm(a, a)) for _ in range(MATMUL_TRIALS[device.type]))
    return round(2 * size**3 / seconds / 1e12, 4)


def _host_copy(device: torch.device) -> float | None:
    """The best of a few copies from pinned memory, GB/s; None on a CPU."""
    if device.type == "cpu":
        return None
    source = torch.empty(COPY_MIB * 2**20, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device)
    seconds = min(_timed(lambda: target.copy_(source)) for _ in range(COPY_TRIALS))
    return round(source.nbytes / seconds / 1e9, 3)


def _pairs(world: World, groups: Groups, watchdog: ProbeWatchdog) -> list[tuple[int, float]]:
    """Bandwidth with local rank 0 of other nodes: (its rank, GB/s). [] on ranks that are not local
    rank 0.

    The nodes are paired in rounds, so that a slow node is slow with every partner. All ranks call it.
    """
    per_node = world.rank.local_world_size
    node = world.rank.rank // per_node
    measured = []
    one, block = (torch.ones(n, device=world.device) for n in (1, PAIR_MIB * 2**18))
    for partners in tournament(world.rank.world_size // per_node):
        watchdog.begin(f"sending {PAIR_MIB} MiB between pairs of nodes")
        dist.barrier(group=groups.control)
        if world.rank.local_rank == 0 and node in partners:
            other = partners[node] * per_node
            exchange = functools.partial(_exchange, other, node < partners[node], groups)
            exchange(one)  # connects
            seconds = min(
                _timed(functools.partial(exchange, block)) for _ in range(BANDWIDTH_ROUNDS)
            )
            measured.append((other, round(2 * block.numel() * 4 / seconds / 1e9, 4)))
    return measured


def _exchange(other: int, is_first: bool, groups: Groups, tensor: torch.Tensor) -> None:
    """Send the tensor to the rank `other` and receive it back, or the other way round."""
    if is_first:
        dist.send(tensor, other, group=groups.data)
    dist.recv(tensor, other, group=groups.data)
    if not is_first:
        dist.send(tensor, other, group=groups.data)


def tournament(players: int) -> Iterator[dict[int, int]]:
    """At most PAIR_ROUNDS rounds (player -> partner) of a round-robin tournament.

    The circle method: the first player stays, the others rotate by one position a round.
    """
    circle = list(range(players + players % 2))  # of an odd number one sits out each round
    for _ in range(min(len(circle) - 1, PAIR_ROUNDS)):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        meeting = [(a, b) for a, b in pairs if players not in (a, b)]
        yield {a: b for pair in meeting for a, b in (pair, pair[::-1])}
        circle = [circle[0], circle[-1], *circle[1:-1]]


def _timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started
