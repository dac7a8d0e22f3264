"""Trials of some of the nodes: their ranks must meet, whatever endpoint is set for all of them."""

import contextlib

import pytest

from forge.core.machine import load_machine
from forge.core.paths import RunPaths
from forge.core.records import Check
from forge.hosts.placement import Placement, WorldLayout
from forge.hosts.rendezvous import EndpointError
from forge.launch.rank_records import ProbedRank, ProbeResult, RankRecord
from forge.preflight import isolate
from forge.slurm import slurm
from forge.slurm.slurm import Job

HOSTS = ("n1", "n2", "n3")
ADDRESSES = {"n1": "10.0.0.1", "n2": "10.0.0.2", "n3": "10.0.0.3"}


@pytest.fixture
def new_prober(tmp_path, monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)

    def make(**fabric):
        machine = load_machine(None, {f"fabric.{key}": value for key, value in fabric.items()})
        placement = Placement(HOSTS, Job("7", "RUNNING", 0, HOSTS, 1, "main", "x", True, None))
        own = {"python": "python", "addresses": ADDRESSES}
        return isolate.Prober(RunPaths(tmp_path), machine, 1, placement, **own)

    return make


def master_of(prober, hosts, folder):
    return prober._trial(hosts, folder, 10).machine.fabric.master_addr


def test_trials_of_some_nodes_meet_at_the_first_of_them(new_prober, tmp_path, monkeypatch):
    prober = new_prober(master_addr="10.0.0.1")
    assert master_of(prober, HOSTS, tmp_path) == "10.0.0.1"
    assert master_of(prober, ("n2", "n3"), prober.trials) == "10.0.0.2"
    prober = new_prober()
    assert master_of(prober, ("n2", "n3"), prober.trials) is None  # by name, as in training
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    assert master_of(prober, ("n2", "n3"), prober.trials) == "10.0.0.2"


def test_endpoint_that_cannot_work_is_a_failed_check(new_prober, monkeypatch):
    def run_ranks(*_, **__):
        raise EndpointError("port 1 is in use", cause="a program", fix="unset MASTER_PORT")

    monkeypatch.setattr(isolate, "run_ranks", run_ranks)
    expected = Check("endpoint", "fail", "port 1 is in use", "unset MASTER_PORT", "a program")
    assert new_prober().together(HOSTS) == [expected]
    failed = RankRecord("failed", 0, 69, message="gone")
    monkeypatch.setattr(isolate, "run_ranks", lambda *_, **__: failed)
    assert new_prober().together(HOSTS)[0].name == "rendezvous"


def test_first_node_that_does_not_answer_is_a_failed_check_within_the_trials_time(
    new_prober, tmp_path, monkeypatch
):
    """The search then finds it, as any other node at fault."""
    times = []

    def run(command, *, timeout_sec, **_):
        times.append(timeout_sec)
        return "", f"no answer within {timeout_sec:g} s"

    monkeypatch.setattr(slurm, "run", run)
    monkeypatch.setattr(slurm, "controller_trouble", lambda: "")
    [check] = new_prober()._trial(("n2", "n3"), tmp_path, 10).run().checks
    assert (check.name, check.status) == ("rendezvous", "fail")
    assert check.message == "node n2 cannot run python: no answer within 10 s"
    assert times == [10]


# --- time -----------------------------------------------------------------------------------------

LATE = RankRecord("failed", 0, 69, cause="JoinError", message="could not join", host="n1")
APART = RankRecord("lost", 0, 69, cause="peer lost", message="all-reduce took longer than 10 s")
CRASHED = RankRecord("lost", 1, 69, cause="peer lost", message="rank 1 of 3 ended", host="n2")
NO_TORCH = RankRecord("failed", 1, 69, cause="environment", message="cannot import torch on n2")
RANKS = [
    ProbedRank(rank, 0, host, "cpu", {}, False, "", 1.0, [(0, 1.0)])
    for rank, host in enumerate(HOSTS)
]
GOOD = RankRecord("completed", result=ProbeResult(RANKS, "gloo", "eth0", True, 40.0, 1.0))


@pytest.fixture
def launches(monkeypatch):
    """launches(*records): how the launches end; the deadline of each."""

    def launches(*records):
        left, deadlines = list(records), []

        def run_ranks(*_, deadline_sec, **__):
            deadlines.append(deadline_sec)
            return left.pop(0)

        monkeypatch.setattr(isolate, "run_ranks", run_ranks)
        return deadlines

    return launches


def failed(prober):
    return [check.message for check in prober.together(HOSTS) if check.status == "fail"]


@pytest.mark.parametrize("record", [LATE, APART])
def test_first_trial_that_names_nobody_is_repeated_once(new_prober, launches, record, capsys):
    deadlines = launches(record, GOOD)
    assert failed(new_prober()) == []
    assert deadlines == [92.5, 46.25]
    assert "trying once more, for 46.2 s at most" in capsys.readouterr().err
    deadlines = launches(record, record)
    assert failed(new_prober()) == [record.message]
    assert len(deadlines) == 2


@pytest.mark.parametrize("record", [CRASHED, NO_TORCH])
def test_trial_that_names_a_rank_is_not_repeated(new_prober, launches, record):
    deadlines = launches(record)
    assert failed(new_prober()) == [record.message]
    assert len(deadlines) == 1


def test_trial_outside_of_a_job_is_not_repeated(new_prober, launches):
    deadlines, prober = launches(APART), new_prober()
    prober._placement = Placement(HOSTS)
    assert failed(prober) == [APART.message]
    assert len(deadlines) == 1


def test_trial_that_was_killed_at_its_deadline_is_repeated(new_prober, monkeypatch):
    starts = []

    def run_ranks(*_, deadline_sec, **__):
        starts.append(deadline_sec)
        clock[0] += deadline_sec
        return CRASHED

    clock = [0.0]
    monkeypatch.setattr(isolate.time, "time", lambda: clock[0])
    monkeypatch.setattr(isolate, "run_ranks", run_ranks)
    assert failed(new_prober())[0].startswith("not done within 46.2 s: rank 1 of 3 ended")
    assert len(starts) == 2


def test_search_has_time_of_its_own_where_the_trials_took_all(new_prober, launches, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(isolate.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(isolate, "ProcessPoolExecutor", lambda *_: contextlib.nullcontext())
    seen = []
    monkeypatch.setattr(isolate, "find_broken", lambda *_: seen.append(prober.has_time))
    launches(APART, APART)
    prober = new_prober()
    prober.together(HOSTS)
    clock[0] += 200
    assert not prober.has_time
    prober.search(HOSTS)
    assert seen == [True]


def test_deadline_grows_with_nodes_and_with_their_ranks():
    machine = load_machine(None, {"preflight.deadline_sec": 300})
    assert isolate.deadline_sec(machine, WorldLayout(1, 8)) == 300
    assert isolate.deadline_sec(machine, WorldLayout(64, 4)) == 300 + 63 * 2
    assert isolate.deadline_sec(machine, WorldLayout(64, 8)) == 300 + 63 * 3


def test_collectives_of_more_nodes_have_more_time(new_prober, tmp_path):
    prober = new_prober()
    assert prober._trial(HOSTS, tmp_path, 10).talk_sec == pytest.approx(10 * 92.5 / 90)
