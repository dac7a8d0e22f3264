"""The preflight of one rank: is it who the geometry says, and do its collectives work and run well?"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from forge.launch import hostname
from forge.launcher import Record, Spec
from forge.lineage import versions
from forge.world import World

LATENCY_ROUNDS = 20
BANDWIDTH_ROUNDS = 3
BANDWIDTH_MIB = 16


def check(world: World, spec: Spec) -> Record:
    """Facts of all ranks and figures of the all-reduce, in rank 0's record. All ranks call it."""
    facts: list[Any] = [None] * world.rank.world_size
    dist.all_gather_object(facts, _facts(world), group=world.control)
    result = {
        "ranks": facts,
        "backend": world.backend,
        "interface": os.environ.get("GLOO_SOCKET_IFNAME", ""),
        **_all_reduce(world),
    }
    world.barrier()
    return Record("completed", world.rank.rank, result=result)


def _facts(world: World) -> dict[str, Any]:
    return {
        "rank": world.rank.rank,
        "local_rank": world.rank.local_rank,
        "host": hostname(),
        "device": str(world.device),
        "versions": versions(),
    }


def _all_reduce(world: World) -> dict[str, Any]:
    """Whether the sum is right; latency (median, microseconds) and bus bandwidth (GB/s).

    Bus bandwidth as in nccl-tests (doc/PERFORMANCE.md): bytes / seconds * 2 (n - 1) / n.
    """
    size = world.rank.world_size
    small = torch.full((1,), float(world.rank.rank + 1), device=world.device)
    dist.all_reduce(small)
    right = small.item() == size * (size + 1) / 2
    latency = [_timed(small) for _ in range(LATENCY_ROUNDS)]
    large = torch.ones(BANDWIDTH_MIB * 2**18, device=world.device)
    seconds = min(_timed(large) for _ in range(BANDWIDTH_ROUNDS))
    bus = large.numel() * 4 / seconds * 2 * (size - 1) / size / 1e9
    return {
        "all_reduce_right": right,
        "latency_us": round(statistics.median(latency) * 1e6, 1),
        "bus_gb_per_sec": round(bus, 3),
    }


def _timed(tensor: torch.Tensor) -> float:
    started = time.perf_counter()
    dist.all_reduce(tensor)
    if tensor.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started
