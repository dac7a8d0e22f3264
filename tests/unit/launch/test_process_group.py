"""Against a slow disk that looks like a hang, and a lost peer that nobody knows the moment of."""

import pickle
import re
import socket
import time
from math import inf, isnan, nan

import pytest
import torch.distributed as dist

from forge.checkpoint.manifest import StoredFile
from forge.core.errors import UnfitError
from forge.core.machine import Machine
from forge.hosts.rendezvous import JoinError
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


def test_ranks_that_do_not_meet_are_told_the_keys_and_not_to_run_what_runs(monkeypatch):
    """The ranks of a preflight gave the advice to run preflight."""
    with socket.socket() as taken:  # it does not listen
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        machine = Machine(device="cpu", fabric={"timeout_sec": 0.2})
        with (
            pytest.raises(
                JoinError, match=r"rank 1 of 2 could not join at 127\.0\.0\.1:"
            ) as caught,
            joined(Rank(1, 1, 2, 2), machine),
        ):
            pass
    assert "preflight" not in caught.value.fix
    assert {"fabric.interface", "fabric.interfaces", "fabric.master_addr"} <= set(
        re.findall(r"fabric\.\w+", caught.value.fix)
    )


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


# --- values of all ranks --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("step-00000010", str),
        ([], list[str]),
        (["a.distcp is truncated", "ä"], list[str]),
        ([0.1, 1e-300, inf, 2.0], list[float]),
        ((0.1, 2**60), tuple[float, int]),
        ([[1, 2], []], list[list[int]]),
        ({"__0_0.distcp": StoredFile(bytes=2**40, digest="ab")}, dict[str, StoredFile]),
        ({"pairs": [[1, 0.5]], "gpu": None, "loss": inf}, dict[str, object]),
    ],
)
def test_values_of_ranks_arrive_as_they_were_sent(world, value, kind):
    assert world.gather_objects(value, kind, "values") == [value]


def test_loss_that_is_no_number_arrives_as_such(world):
    [[loss]] = world.gather_objects([nan], list[float], "losses")
    assert isnan(loss)


def test_ranks_unpickle_nothing_of_each_other(world, monkeypatch):
    monkeypatch.setattr(pickle, "loads", lambda _: pytest.fail("a pickle was read"))
    monkeypatch.setattr(dist.distributed_c10d, "_unpickler", pickle.loads)
    world.gather_objects({"a": 1}, dict[str, int], "values")


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_value_of_another_type_names_the_collective(world):
    with pytest.raises(UnfitError, match="damage: a rank sent no") as caught:
        world.gather_objects("all of it", list[str], "damage")
    assert "same version on all nodes" in caught.value.fix
