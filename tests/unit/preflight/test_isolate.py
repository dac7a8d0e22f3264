"""Trials of some of the nodes: their ranks must meet, whatever endpoint is set for all of them."""

import pytest

from forge.cluster.placement import Placement
from forge.cluster.rendezvous import EndpointError
from forge.cluster.slurm import Job
from forge.core.machine import load_machine
from forge.core.paths import RunPaths
from forge.core.records import Check
from forge.launch.rank_records import RankRecord
from forge.preflight import isolate

HOSTS = ("n1", "n2", "n3")
ADDRESSES = {"n1": "10.0.0.1", "n2": "10.0.0.2", "n3": "10.0.0.3"}


@pytest.fixture
def new_prober(tmp_path, monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)

    def make(**fabric):
        machine = load_machine(None, {f"fabric.{key}": value for key, value in fabric.items()})
        placement = Placement(HOSTS, Job("7", "RUNNING", 0, HOSTS, 1, "main", "x", True, None))
        own = {"python": "python", "end": float("inf"), "addresses": ADDRESSES}
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
