"""Against a slow disk that looks like a hang, and a lost peer that nobody knows the moment of."""

import time

import pytest
import torch.distributed as dist

from forge.core.machine import Machine
from forge.launch import process_group
from forge.launch.process_group import Background, PeerFailed, joined, named
from forge.launch.rank import Rank


@pytest.fixture
def beats(monkeypatch):
    """The phases that the main thread begins, and whether it waits for other ranks in them."""
    begun = []
    monkeypatch.setattr(
        process_group.heartbeat, "beat", lambda phase, waits=False: begun.append((phase, waits))
    )
    return begun


@pytest.fixture
def world(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with joined(Rank(0, 0, 1, 1), Machine(device="cpu")) as world:
        yield world


def test_waiting_for_a_slow_disk_is_progress(world, beats):
    collective, end = ("wait for the save of step 4", True), time.monotonic() + 60

    def write():
        while beats.count(collective) < 5:
            assert time.monotonic() < end
            time.sleep(0.001)
        return "written"

    assert world.wait_for(Background(write, "save-4"), "wait for the save of step 4") == "written"


def test_phase_of_a_collective_ends_with_it(beats):
    with named("losses of step 8"):
        pass
    assert beats == [("losses of step 8", True), ("work after losses of step 8", False)]


def test_loss_of_a_peer_tells_what_the_rank_did():
    with (
        pytest.raises(PeerFailed, match="losses of step 8: gone") as caught,
        named("losses of step 8"),
    ):
        raise dist.DistNetworkError("gone")
    assert (caught.value.activity.phase, caught.value.activity.waits) == ("losses of step 8", True)
