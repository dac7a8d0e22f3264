"""Threat: who can connect to a port of Gloo takes the place of a rank and sends a pickle that runs."""

import errno
import os
import pickle
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from forge.checkpoint import storage
from forge.checkpoint.save_plan import KeptPlans
from forge.core.errors import DataError, UnfitError
from forge.core.machine import Machine
from forge.launch.process_group import joined
from forge.launch.rank import Rank

WEIGHTS = torch.arange(6.0).reshape(2, 3)


class Planted:
    """A pickle of this calls a function."""

    def __init__(self, function, *arguments):
        self.called = (function, arguments)

    def __reduce__(self):
        return self.called


@pytest.fixture
def exchanged(tmp_path, monkeypatch):
    """exchanged(value): the value as another rank gets it in an object collective, after a save."""
    # So that what the save sets is taken back.
    monkeypatch.setattr(dist.distributed_c10d, "_unpickler", pickle.Unpickler)
    with joined(Rank(0, 0, 1, 1), Machine(device="cpu")) as world:
        storage.write_state({"model": {"w": WEIGHTS}}, tmp_path / "by-ranks", world, KeptPlans())

        def exchange(value):
            values = [None]
            dist.all_gather_object(values, value, group=world.control)
            return values[0]

        yield exchange


def test_pickle_of_a_stranger_in_the_place_of_a_rank_does_not_run(exchanged, tmp_path):
    harm = tmp_path / "harm"
    with pytest.raises(UnfitError, match=r"a pickle with (posix|nt)\.system") as caught:
        exchanged(Planted(os.system, f"touch {harm}"))
    assert not harm.exists()
    assert "docs/environment.md says who can connect" in caught.value.fix


@pytest.mark.parametrize("function", [eval, exec, __import__, open, torch.load, torch.hub.load])
def test_ranks_reach_no_function_of_each_other(exchanged, function):
    with pytest.raises(UnfitError, match="which no save and no load needs"):
        exchanged(Planted(function, "1"))


def test_errors_of_other_ranks_arrive_with_their_words(exchanged):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/results/a.distcp")
    bad = DataError("a.distcp is truncated", cause="a full disk", fix="restore it")
    for error in (full, bad, RuntimeError("no"), EOFError("it ends"), torch.OutOfMemoryError("no")):
        try:
            raise error
        except Exception as err:
            found, trace = exchanged((err, traceback.extract_tb(err.__traceback__)))
        assert (type(found), str(found)) == (type(error), str(error))
        assert trace[0].name == "test_errors_of_other_ranks_arrive_with_their_words"
    failed = exchanged(dcp.CheckpointException("save", {1: (bad, trace)}))
    assert str(failed.failures[1][0]) == str(bad)
