"""Against a rank that hangs and says nothing, and a slow one that is taken for hung."""

import subprocess
import sys
import time

import pytest

from forge.core.process import hostname
from forge.launch import lost_ranks
from forge.launch.heartbeat import Heartbeat, LastCollectives
from forge.launch.rank_records import RankRecord
from forge.launch.watchdog import Watchdog
from forge.slurm import slurm


class Stalling(Heartbeat):
    """A heartbeat whose clock stands until the test moves it."""

    def __init__(self):
        self.now = 0.0
        super().__init__(lambda: self.now)
        self.timeout_sec = 60.0


@pytest.fixture
def beats():
    return Stalling()


@pytest.fixture
def dumps():
    return []


@pytest.fixture
def watchdog(spec, beats, dumps, monkeypatch):
    # Else it would write into the output of later tests.
    monkeypatch.setattr("faulthandler.dump_traceback_later", lambda *_: None)
    return Watchdog(spec, 2, lambda: dumps.append(1), beats)


def test_rank_that_hangs_in_work_of_its_own_leaves_a_record_and_its_stacks(
    watchdog, spec, beats, dumps, capfd
):
    beats.begin_step(18)
    beats.now = 30.0
    watchdog.look()
    found = RankRecord.read(spec, 2)
    assert (found.status, found.rank, found.host) == ("lost", 2, hostname())
    assert found.message == "no progress: in the data read of step 18 for 30 s"
    assert found.activity == beats.activity
    said = capfd.readouterr().err
    assert "rank 2 has been in the data read of step 18 for 30 s" in said
    assert "test_rank_that_hangs_in_work_of_its_own" in said
    assert dumps == [1]


def test_rank_that_waits_for_others_leaves_the_record_of_one_that_lost_a_peer(
    watchdog, spec, beats
):
    """NCCL's own watchdog ends the process later, without any record."""
    beats.beat("all-reduce of gradients in step 18", waits=True)
    beats.now = 30.0
    watchdog.look()
    found = RankRecord.read(spec, 2)
    assert (found.status, found.cause) == ("failed", "peer lost")


def test_stacks_are_written_once_and_the_record_follows(watchdog, spec, beats, dumps, capfd):
    for now in (30.0, 40.0, 50.0):
        beats.now = now
        watchdog.look()
    assert RankRecord.read(spec, 2).activity.sec == 50
    assert capfd.readouterr().err.count("the stacks of its threads") == len(dumps) == 1


def test_rank_that_was_only_slow_withdraws_its_record(watchdog, spec, beats, capfd):
    beats.now = 30.0
    watchdog.look()
    beats.beat("evaluation")
    watchdog.look()
    assert RankRecord.read(spec, 2).message == "it exited without a record"
    assert "rank 2 makes progress again: evaluation" in capfd.readouterr().err


def test_rank_within_its_limit_leaves_nothing(watchdog, spec, beats, dumps, capfd):
    beats.now = 29.0
    watchdog.look()
    assert RankRecord.read(spec, 2).activity is None
    assert (dumps, capfd.readouterr().err) == ([], "")


# pause(3) under PyDLL keeps the GIL.
HOLDS_THE_GIL = """
import ctypes, sys
from pathlib import Path
from forge.launch.heartbeat import heartbeat
from forge.launch.rank_records import LaunchSpec
from forge.launch.watchdog import Watchdog

def hang_in_c():
    ctypes.PyDLL(None).pause()

watchdog = Watchdog(LaunchSpec.read(Path(sys.argv[1])), 2, lambda: None)
heartbeat.timeout_sec = 4.0
heartbeat.beat("work")
watchdog.look()
hang_in_c()
"""


def test_rank_that_waits_in_a_job_tells_whether_its_node_reaches_slurm(spec, beats, monkeypatch):
    trouble = ["scontrol: slurm_load_ctl_conf error: Unable to contact slurm controller"]
    monkeypatch.setattr(slurm, "is_here", lambda: True)
    monkeypatch.setattr(slurm, "controller_trouble", lambda *, timeout_sec: trouble[0])
    in_job = spec.model_copy(update={"job": "42", "nodes": 2})
    dog = Watchdog(in_job, 4, lambda: None, beats)  # the first one of the second node
    beats.beat("losses", waits=True)
    for answer in (trouble[0], ""):
        trouble[0] = answer
        beats.now += 31
        dog.look()
        dog.look()
        assert RankRecord.read(spec, 4).activity.reaches_slurm == (not answer)
        beats.beat("losses", waits=True)
        dog.look()
        assert beats.reaches_slurm is None


def test_call_into_c_that_keeps_the_gil_is_in_the_log(spec, tmp_path):
    log = tmp_path / "log"
    with open(log, "w") as output:
        rank = subprocess.Popen(
            [sys.executable, "-c", HOLDS_THE_GIL, str(spec.path)], stderr=output
        )
    try:
        end = time.monotonic() + 60
        while "in hang_in_c" not in log.read_text():
            assert rank.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.05)
    finally:
        rank.kill()
        rank.wait()


# --- numbers of collectives -----------------------------------------------------------------------

# Two ranks as on a GPU: both hosts wait in the same phase, only one of them in the collective.
ALIKE = """
import os, sys, threading, time
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from forge.launch.heartbeat import heartbeat
from forge.launch.process_group import World, collectives, named
from forge.launch.rank import Rank
from forge.launch.rank_records import LaunchSpec
from forge.launch.watchdog import Watchdog

rank, store = int(sys.argv[2]), dist.FileStore(sys.argv[3], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
world = World(None, torch.device("cpu"), "gloo", dist.group.WORLD)
spec = LaunchSpec.read(Path(sys.argv[1]))
dog = Watchdog(spec, rank, lambda: None, collectives=lambda: collectives(world))
numbers = torch.ones(4)
for number in (1, 2, 3):
    dist.all_reduce(numbers)
    # Gloo's threads note the ends of collectives: that of an earlier one must not come last.
    while collectives(world)[0].completed < number:
        time.sleep(0.01)
heartbeat.timeout_sec = 2.0
dog.start()
with named("results of step 3"):
    if rank == 0:
        dist.all_reduce(numbers)
    time.sleep(60)
"""


def test_rank_that_has_not_come_to_the_collective_of_the_other_is_told_by_torchs_flight_recorder(
    spec, tmp_path
):
    """With real ranks of Gloo."""
    command = [sys.executable, "-c", ALIKE, spec.path]
    both = [
        subprocess.Popen([*command, str(rank), tmp_path / "store"], stderr=subprocess.DEVNULL)
        for rank in (0, 1)
    ]
    try:
        end, records = time.monotonic() + 60, []
        while not records or not all(r.activity and r.activity.collectives for r in records):
            assert time.monotonic() < end and not any(rank.poll() for rank in both), records
            time.sleep(0.05)
            records = [RankRecord.read(spec, rank) for rank in (0, 1)]
    finally:
        for rank in both:
            rank.kill()
            rank.wait()
    assert {record.status for record in records} == {"failed"}
    assert {record.activity.phase for record in records} == {"results of step 3"}
    found = lost_ranks.judged(records)
    assert found.message.startswith(
        f"rank 1 of 2 on {hostname()} has not started collective 4 of the process group gloo 0, in which"
        " others wait (its last one is 3)"
    )


def test_numbers_of_collectives_are_recorded_before_the_dump_and_once_in_a_stall(
    spec, beats, monkeypatch
):
    """The dump asks the device, which may hang."""
    monkeypatch.setattr("faulthandler.dump_traceback_later", lambda *_: None)
    seen, asked = (LastCollectives("nccl 0", 12, 11, 11),), []

    def dump():
        assert RankRecord.read(spec, 2).activity.collectives == seen

    dog = Watchdog(spec, 2, dump, beats, collectives=lambda: asked.append(1) or seen)
    beats.beat("results of step 3", waits=True)
    for now in (30.0, 40.0):
        beats.now = now
        dog.look()
    assert (len(asked), RankRecord.read(spec, 2).activity.collectives) == (1, seen)
    beats.beat("results of step 4", waits=True)
    dog.look()
    assert beats.collectives == ()
