"""The rules of a storm that are the same for every contender, on one that Slurm does not know."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from threading import Event
from typing import Any

import psutil
import pytest

from bench.storm import chain, strike, trace
from bench.storm.contender import Contender, Layout
from bench.storm.raw import Raw
from bench.storm.trace import Kind, Planned, Trace
from tools.slurm_cluster.machines import ClusterError

pytestmark = pytest.mark.tools


class FakeCluster:
    """A Slurm that says one state of every job."""

    def __init__(self) -> None:
        self.state = "RUNNING"

    def job(self, job: str) -> dict[str, str]:
        return {"JobState": self.state}

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(words, 0, "", "")


class Fake(Contender):
    """One that has trained a step before the storm, and has this number of ranks."""

    name, what = "fake", "a fake"
    num_ranks = 1

    def __init__(self, folder: Path) -> None:
        self.slurm = FakeCluster()
        cluster: Any = self.slurm
        super().__init__(cluster, folder, Layout(nodes=1))
        self.starts: list[str] = []

    def start(self) -> None:
        self.starts.append(self.slurm.state)
        if len(self.starts) > 1:
            self.slurm.state = "RUNNING"
        step = {"step": 1, "chain": next(chain.undisturbed(1))}
        lines = [{"resumed": "", "corrupt": False}, step]
        same = {"time": time.time(), "launch": str(len(self.starts)), "start": 0}
        with open(self.step_log, "a") as file:
            file.writelines(json.dumps(same | line) + "\n" for line in lines)

    @property
    def job(self) -> str:
        return "1"

    def ranks(self) -> list[psutil.Process]:
        return [psutil.Process()] * self.num_ranks


@pytest.fixture
def contender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    monkeypatch.setattr(strike, "LOOK_SEC", 0.01)
    monkeypatch.setattr(strike, "ASK_SEC", 0.02)
    monkeypatch.setattr(strike, "HAND_SEC", 0.3)
    return Fake(tmp_path / "fake")


def weather(contender: Fake, *kinds: str, sec: float = 1.0) -> Raw:
    events = tuple(Planned(at=0.1 + 0.1 * n, kind=kind) for n, kind in enumerate(kinds))
    made = strike.Storm(contender, Trace(source="", events=events), sec / 60, lambda text: None)
    return made.run(seed=1)


def hits(monkeypatch: pytest.MonkeyPatch, kind: str, fault: Any) -> None:
    """The kind of event calls this in place of its fault."""
    what = trace.KINDS[kind]
    replaced = Kind(what.what, what.share, fault, what.needs_ranks, what.repaired_sec)
    monkeypatch.setitem(trace.KINDS, kind, replaced)


def test_event_hits_a_job_that_runs_and_its_repair_comes_at_the_end_at_the_latest(
    contender: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def fault(job: Contender, ranks: list[psutil.Process]) -> Any:
        done.append(f"hit {job.job} with {len(ranks)} rank")
        return lambda: done.append("repaired")

    hits(monkeypatch, "power-cut", fault)  # repaired after 60 s, longer than this storm
    [seen] = weather(contender, "power-cut").strikes
    assert seen.landed is not None and seen.missed == ""
    assert done == ["hit 1 with 1 rank", "repaired"]


@pytest.mark.parametrize(
    "case",
    [
        ("PENDING", 1, "preemption", "the job was PENDING"),
        ("RUNNING", 0, "killed-rank", "no rank was there"),
    ],
)
def test_event_that_has_nothing_to_hit_is_missed(
    contender: Fake, monkeypatch: pytest.MonkeyPatch, case: tuple[str, int, str, str]
) -> None:
    state, ranks, kind, missed = case
    hits(monkeypatch, kind, lambda *_: pytest.fail("it was hit"))
    contender.slurm.state, contender.num_ranks = state, ranks
    [seen] = weather(contender, kind).strikes
    assert (seen.landed, seen.missed) == (None, missed)


def test_time_limit_holds_no_other_event_up_and_is_missed_where_that_ends_the_job_first(
    contender: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    preempted, limit_is_over = Event(), Event()

    def limit(*_: object) -> Any:
        assert preempted.wait(30)
        return limit_is_over.set

    def preempt(*_: object) -> Any:
        preempted.set()
        assert limit_is_over.wait(30)  # Slurm's answer to it comes later than the end of the job
        return lambda: None

    hits(monkeypatch, "time-limit", limit)
    hits(monkeypatch, "preemption", preempt)
    monkeypatch.setattr(contender, "end", preempted.set)
    seen = {one.kind: one for one in weather(contender, "time-limit", "preemption").strikes}
    assert seen["preemption"].landed is not None
    assert (seen["time-limit"].landed, seen["time-limit"].missed) == (None, "preemption came first")


def test_event_that_is_not_seen_to_happen_is_missed(
    contender: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(*_: object) -> None:
        raise ClusterError("not dead: rank process 7 within 10 s.\nmore")

    hits(monkeypatch, "killed-rank", fault)
    [seen] = weather(contender, "killed-rank").strikes
    assert (seen.landed, seen.missed) == (None, "not dead: rank process 7 within 10 s.")


def test_job_that_has_ended_for_good_is_submitted_again_by_a_person_later(
    contender: Fake,
) -> None:
    contender.slurm.state = "FAILED"
    seen = weather(contender, sec=6)
    assert contender.starts == ["FAILED"] * 2
    [hand] = seen.hands
    assert hand >= 0.3


def test_job_that_waits_in_the_queue_is_left_to_itself(contender: Fake) -> None:
    contender.slurm.state = "PENDING"
    assert weather(contender, sec=0.6).hands == []
    assert contender.starts == ["PENDING"]
