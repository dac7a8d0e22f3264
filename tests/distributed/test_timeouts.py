"""Against a rank that waits half an hour for one that is gone: torch gives its own groups 30 minutes."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from typing import Any

import torch
import torch.distributed as dist

from forge.core.machine import Machine
from forge.launch.heartbeat import heartbeat
from forge.launch.process_group import joined
from forge.launch.rank import Rank
from forge.trainer.transforms import _mesh

RANKS, COPIES = 4, 2
TIMEOUT_SEC = 5.0
DEADLINE_SEC = 120.0  # of the start of four processes, and of a timeout


def _waits_in_vain(rank: int, port: int, results: Any, is_over: Any) -> None:
    """Rank 0 reduces inside of a copy of the model, rank 3 over the copies; no other rank comes."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(RANKS)
    )
    with joined(Rank(rank, rank, RANKS, RANKS), Machine(device="cpu")) as world:
        heartbeat.timeout_sec = TIMEOUT_SEC  # as fabric.timeout_sec, once all ranks have come
        mesh = _mesh(world, RANKS // COPIES)
        waiting = {0: "shard", 3: "replicate"}.get(rank)
        if waiting is None:
            is_over.wait(DEADLINE_SEC)
            os._exit(0)
        started = time.monotonic()
        try:
            dist.all_reduce(torch.ones(1), group=mesh.get_group(waiting))
        except RuntimeError:
            results.put((waiting, time.monotonic() - started))
        is_over.wait(DEADLINE_SEC)
        os._exit(0)


def test_group_of_a_mesh_gives_up_after_the_timeout_of_the_fabric():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results, is_over = context.Queue(), context.Event()
    processes = [
        context.Process(target=_waits_in_vain, args=(rank, port, results, is_over))
        for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    try:
        seconds = dict(results.get(timeout=DEADLINE_SEC) for _ in range(2))
    finally:
        is_over.set()
        for process in processes:
            process.join(DEADLINE_SEC)
    assert seconds.keys() == {"shard", "replicate"}
    assert min(seconds.values()) > TIMEOUT_SEC / 2
