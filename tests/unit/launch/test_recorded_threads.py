"""Against a rank with other threads than the training that it continues, or held to few beside a GPU."""

from __future__ import annotations

import pytest

from forge import worker
from forge.core.machine import Machine
from forge.core.process import Process
from forge.hosts import network
from forge.launch.rank_records import LaunchSpec, ReplayTask, TrainTask

CORES = 4


def train(threads: int | None) -> TrainTask:
    return TrainTask(step=0, started=0.0, staged={}, shared="", threads=threads)


def replay(threads: int | None) -> ReplayTask:
    return ReplayTask(checkpoint="", shards="", threads=threads)


@pytest.mark.parametrize(
    ("task", "exported", "gpus", "expected"),
    [
        (train(None), None, 0, None),  # a new run, or one of GPUs
        (train(2), None, 0, 2),
        (train(CORES + 1), None, 0, None),
        (train(2), "3", 0, None),
        (train(2), None, 8, None),
        (replay(None), "3", 0, None),
        (replay(2), "3", 0, 2),
        (replay(CORES + 1), None, 8, CORES + 1),
    ],
)
def test_rank_takes_the_threads_of_what_it_continues(task, exported, gpus, expected, monkeypatch):
    monkeypatch.setattr(network, "count_gpus", lambda: gpus)
    spec = LaunchSpec(
        **{"task": task, "run": "", "launch": "", "machine": Machine(), "nodes": 1},
        **{"ranks_per_node": 1, "launcher": Process.current(), "master": None},
        **{"cpus_per_rank": CORES, "threads": exported},
    )
    assert worker._recorded_threads(spec) == expected
