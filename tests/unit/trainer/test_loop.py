"""What the loop gives to the watchdog of its rank."""

from types import SimpleNamespace

import pytest
import torch

from forge.launch.heartbeat import LastCollectives
from forge.trainer import loop


class Started(Exception):
    """Ends the loop once the watchdog has been started."""


def test_watchdog_is_told_how_far_this_rank_has_come_in_its_collectives(monkeypatch):
    numbers = (LastCollectives("gloo 0", 12, -1, 11),)
    world = SimpleNamespace(rank=SimpleNamespace(rank=3))
    monkeypatch.setattr(loop, "collectives", lambda of: numbers if of is world else ())

    class Watchdog:
        def __init__(self, spec, rank, dump, *, collectives):
            assert (rank, collectives()) == (3, numbers)

        def start(self):
            raise Started

    monkeypatch.setattr(loop, "Watchdog", Watchdog)
    with pytest.raises(Started):
        loop.train(None, None, world, None, None)


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (ValueError("a bug"), 60.0),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), 60.0),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), loop.PEERS_SAVE_SEC),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), loop.PEERS_SAVE_SEC),
        (RuntimeError("[gloo/transport] Connection closed by peer"), loop.PEERS_SAVE_SEC),
    ],
)
def test_save_in_progress_gets_its_time_unless_a_gpu_or_a_rank_is_gone(error, seconds):
    assert loop.drain_sec(error, 60.0) == seconds
