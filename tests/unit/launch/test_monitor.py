"""The monitor must tell what GPUs and node do, survive a GPU that does not answer, and disturb
no rank."""

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pynvml
import pytest
from support import nvml
from support.nvml import UNSUPPORTED, FakeGpu

from forge.core.machine import load_machine
from forge.core.process import hostname
from forge.hosts import network
from forge.hosts.gpus import visible_gpus
from forge.launch import monitor
from forge.launch.monitor import node_load, start_monitor
from forge.launch.rank import Rank
from forge.launch.rank_records import PreflightTask, TrainTask

TRAIN = TrainTask(step=0, started=0.0, staged={}, shared="")


def load(monkeypatch, *fakes):
    nvml.install(monkeypatch, *fakes)
    with visible_gpus() as gpus:
        return node_load("l1", gpus)


def test_each_gpu_has_its_numbers(monkeypatch):
    line = load(monkeypatch, FakeGpu(used_mib=71680), FakeGpu(percent=3, watts=70.5, celsius=30))
    assert (line.gpu_percent, line.gpu_watts) == ([97, 3], [650.0, 70.5])
    assert (line.gpu_celsius, line.gpu_memory_gib) == ([61, 30], [70.0, 0.0])


@pytest.mark.parametrize("code", [UNSUPPORTED, pynvml.NVML_ERROR_GPU_IS_LOST])
def test_a_number_that_a_gpu_does_not_give_is_null(monkeypatch, code):
    line = load(monkeypatch, FakeGpu(errors={"PowerUsage": code}))
    assert (line.gpu_watts, line.gpu_percent) == ([None], [97])


def test_a_node_without_gpus_has_its_own_numbers():
    line = node_load("l1", [])
    assert line.memory_gib > 0 and line.gpu_percent == []


def test_counters_of_infiniband_count_four_bytes_as_one(tmp_path, monkeypatch):
    monkeypatch.setattr(network, "RDMA_DEVICES", tmp_path)
    for device, value in (("mlx5_0", "100"), ("mlx5_1", "25"), ("mlx5_2", "N/A")):
        folder = tmp_path / device / "ports/1/counters"
        folder.mkdir(parents=True)
        (folder / "port_rcv_data").write_text(value)
        (folder / "port_xmit_data").write_text("1")
    assert network.rdma_bytes() == (500, 12)


def spec(tmp_path, task=TRAIN, every_sec=10):
    machine = load_machine(None, {"monitor.every_sec": every_sec})
    return SimpleNamespace(machine=machine, task=task, run=str(tmp_path), launch="l1")


@pytest.mark.parametrize(
    ("local_rank", "settings", "starts"),
    [
        (0, (TRAIN, 10), True),
        (1, (TRAIN, 10), False),
        (0, (TRAIN, 0), False),
        (0, (PreflightTask(patience_sec=1, nccl_file=""), 10), False),
    ],
)
def test_the_first_rank_of_a_node_that_trains_starts_it(
    tmp_path, monkeypatch, local_rank, settings, starts
):
    started = []
    monkeypatch.setattr(monitor.subprocess, "Popen", lambda line, **_: started.append(line))
    start_monitor(spec(tmp_path, *settings), replace(Rank(2, 0, 4, 2), local_rank=local_rank))
    assert bool(started) == starts


def test_a_monitor_that_cannot_start_is_a_warning(tmp_path, monkeypatch, capsys):
    def fails(*_, **__):
        raise OSError("no more processes")

    monkeypatch.setattr(monitor.subprocess, "Popen", fails)
    start_monitor(spec(tmp_path), Rank(0, 0, 1, 1))
    assert "no more processes; training is not affected" in "".join(capsys.readouterr())


def test_it_ends_when_its_rank_is_another_one(tmp_path, monkeypatch):
    monkeypatch.setattr(monitor, "stop_with_parent", lambda: None)
    monkeypatch.setattr(monitor.os, "nice", lambda _: 0)
    monkeypatch.setattr(monitor.signal, "signal", lambda *_: None)
    parents = iter([7, 7, 1])
    monkeypatch.setattr(monitor.os, "getppid", lambda: next(parents))
    (tmp_path / "monitor").mkdir()
    monitor.main(str(tmp_path), "l1", "0.01", "7")
    lines = (tmp_path / "monitor" / f"{hostname()}.jsonl").read_text().splitlines()
    assert [json.loads(line)["launch"] for line in lines] == ["l1", "l1"]


def test_a_monitor_that_starts_after_its_rank_has_ended_makes_nothing(tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    done = subprocess.run(
        [sys.executable, "-m", "forge.launch.monitor", str(tmp_path), "l1", "1", str(ended.pid)],
        timeout=60,
        check=False,
    )
    assert done.returncode == 0 and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("of_job", "here", "seen"),
    [
        ("0,1", 2, ["GPU-0", "GPU-1"]),  # all of a node, each rank bound to one of them
        ("2,3", 4, ["GPU-2", "GPU-3"]),  # some of a node, whose others NVML shows as well
        ("2,3", 2, ["GPU-0", "GPU-1"]),  # in a cgroup, where NVML counts from 0
        ("", 2, ["GPU-0"]),  # Slurm does not say
        ("gpu:2", 2, ["GPU-0"]),
    ],
)
def test_monitor_of_a_rank_that_is_bound_to_one_gpu_looks_at_all_of_the_job(
    monkeypatch, of_job, here, seen
):
    nvml.install(monkeypatch, *[FakeGpu(uuid=f"GPU-{number}") for number in range(here)])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.delenv("SLURM_STEP_GPUS", raising=False)
    monkeypatch.setenv("SLURM_JOB_GPUS", of_job)
    with visible_gpus(of_job=True) as gpus:
        assert [f"GPU-{gpu.word}" for gpu in gpus] == seen
    with visible_gpus() as gpus:
        assert [gpu.word for gpu in gpus] == ["0"]
