"""Device, process groups and agreement among the ranks of one launch (torch.distributed)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from forge.core.errors import ConfigError, UnfitError
from forge.core.machine import Fabric
from forge.launch.rank import Rank

T = TypeVar("T")

# Ranks read and write at the speed of their own disks. That one is gone is noticed by others, and
# sooner: see World.wait_for.
SLOWEST_DISK_SEC = 3600.0
POLL_SEC = 0.005
# Once an action has failed on one rank, the threads of the others are told of it within this time.
FAILURE_SEC = 5.0


class PeerFailed(RuntimeError):
    """Another rank failed, its own record says why; or it is gone, or does not answer."""


def is_peer_loss(error: BaseException) -> bool:
    """Whether an error on this rank only tells that another rank is gone, or does not answer."""
    if isinstance(error, PeerFailed | dist.DistError):
        return True
    # Gloo raises plain RuntimeErrors that name their source file.
    return isinstance(error, RuntimeError) and "gloo" in str(error).lower()


@contextmanager
def named(what: str) -> Iterator[None]:
    """Around a collective: when it fails for a peer's sake, PeerFailed says which one it was.

    Which peer it was the launcher tells: the one that left no record.
    """
    try:
        yield
    except RuntimeError as err:
        if not is_peer_loss(err) or isinstance(err, PeerFailed):
            raise
        raise PeerFailed(f"{what}: {_reason(err)}") from err


def _reason(err: RuntimeError) -> str:
    """What Gloo says, without its source file and its advice."""
    said = " ".join(str(err).split())
    return (said.partition("] ")[2] or said).partition(". This is typically")[0]


class Background(Generic[T]):
    """An action in a thread of its own, begun at once."""

    def __init__(self, action: Callable[[], T], name: str) -> None:
        self._action = action
        self._value: T | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._action()
        except BaseException as err:  # torch's CheckpointException is no Exception
            self.error = err

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    @property
    def value(self) -> T:
        """What the action gave back. Raises what it raised. Only once it is done."""
        assert self.is_done
        if self.error is not None:
            raise self.error
        return self._value  # type: ignore[return-value]

    def join(self, timeout_sec: float) -> None:
        self._thread.join(timeout_sec)


@dataclass(frozen=True)
class World:
    """All ranks, joined. `control` is a Gloo group for flags and objects, off the GPU's queue."""

    rank: Rank
    device: torch.device
    backend: str
    control: dist.ProcessGroup

    def beside(self) -> World:
        """The same ranks with a control group of their own, for a thread beside the main one.

        Its collectives wait for SLOWEST_DISK_SEC: ranks may be that far apart with their files.
        All ranks call it.
        """
        timeout = timedelta(seconds=SLOWEST_DISK_SEC)
        return replace(self, control=dist.new_group(backend="gloo", timeout=timeout))

    def gather(self, values: list[float], what: str = "agreement") -> list[list[float]]:
        """Every rank's few numbers, by rank, the same on all ranks. All ranks call it.

        what: the name of this collective in the message when a rank does not take part.
        """
        mine = torch.tensor(values, dtype=torch.float64)
        everyone = torch.empty(self.rank.world_size * len(values), dtype=torch.float64)
        with named(what):
            dist.all_gather_single(everyone, mine, group=self.control)
        table: list[list[float]] = everyone.view(self.rank.world_size, len(values)).tolist()
        return table

    def gather_objects(self, value: T, what: str) -> list[T]:
        """Every rank's value, by rank, the same on all ranks. All ranks call it."""
        values: list[Any] = [None] * self.rank.world_size
        with named(what):
            dist.all_gather_object(values, value, group=self.control)
        return values

    def together(self, action: Callable[[], T], what: str = "agreement") -> T:
        """Do `action` on every rank; if it fails on one, no rank goes on. All ranks call it.

        Raises what `action` raised, and PeerFailed on the ranks where it went well: without this
        they would wait in the next collective for a rank that has left.
        """
        error: Exception | None = None
        try:
            outcome = action()
        except Exception as err:
            error = err
        table = self.gather([float(error is not None)], what)
        failed = [rank for rank, row in enumerate(table) if row[0]]
        if error:
            raise error
        if failed:
            raise PeerFailed(f"{what}: rank {failed[0]} failed")
        return outcome

    def on_main(self, action: Callable[[], object], what: str = "agreement") -> None:
        """Do `action` on rank 0 while the others wait. All ranks call it; raises as together does."""
        self.together(action if self.rank.is_main else lambda: None, what)

    def wait_for(self, work: Background[T], what: str) -> T:
        """Wait until every rank's work has ended, or that of one has failed; raises as together does.

        All ranks call it. One that stopped or is gone is noticed within the fabric's timeout, however
        long the work of another takes: the main threads go on answering.
        """
        while True:
            done = work.is_done  # asked once: it may end with an error between two questions
            failed = done and work.error is not None
            table = self.gather([float(done), float(failed)], what)
            if any(row[1] for row in table):
                # The table decides, so that all ranks leave here; and the rank with the reason may
                # be an instant behind those that its thread has told.
                work.join(FAILURE_SEC)
                where = [rank for rank, row in enumerate(table) if row[1]]
                raise work.error or PeerFailed(f"{what}: it failed on rank {where[0]}")
            if all(row[0] for row in table):
                return work.value
            work.join(POLL_SEC)

    def patiently(self, action: Callable[[], T], what: str) -> T:
        """`together` for what takes as long as a rank's disk is slow. All ranks call it; an action
        with collectives of its own needs `beside`."""
        if self.device.type != "cuda":
            return self.wait_for(Background(action, what), what)

        def on_device() -> T:
            torch.cuda.set_device(self.device)  # a thread begins with the first one
            return action()

        return self.wait_for(Background(on_device, what), what)

    def barrier(self, what: str = "barrier") -> None:
        """All ranks wait for each other."""
        with named(what):
            dist.barrier(group=self.control)


@contextmanager
def joined(rank: Rank, fabric: Fabric) -> Iterator[World]:
    """Rendezvous of all ranks within fabric.timeout_sec, left in good order. All ranks call it.

    Raises UnfitError when ranks do not meet, ConfigError when the backend cannot work here.
    """
    gpus = torch.cuda.device_count()
    enough = gpus >= rank.local_world_size
    backend = fabric.backend if fabric.backend != "auto" else ("nccl" if enough else "gloo")
    if backend == "nccl" and not enough:
        raise ConfigError(
            f"backend nccl with {rank.local_world_size} ranks on a node that shows {gpus} GPUs",
            cause="the job asked for fewer GPUs than ranks, or CUDA_VISIBLE_DEVICES hides some",
            fix="give each rank a GPU, or set fabric.backend to gloo",
        )
    device = torch.device("cuda", rank.local_rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=fabric.timeout_sec)
    try:
        _init(backend, rank, timeout, device)
        control = dist.group.WORLD
        if backend != "gloo":  # where a group is not told its timeout, it has one of 30 minutes
            control = dist.new_group(backend="gloo", timeout=timeout)
    except (dist.DistError, RuntimeError, ValueError) as err:
        master = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise UnfitError(
            f"rank {rank.rank} of {rank.world_size} could not join at {master}: {err}",
            cause="a rank did not start, or the interface"
            f" {os.environ.get('GLOO_SOCKET_IFNAME', '(torch chose it)')} does not reach the others",
            fix="run forge preflight; see fabric.interface in profiles/README.md",
        ) from err
    assert control is not None
    yield World(rank, device, backend, control)
    # Not after an error: a thread may be in a collective still, and the process ends anyway.
    dist.destroy_process_group()


def _init(backend: str, rank: Rank, timeout: timedelta, device: torch.device) -> None:
    if rank.world_size == 1 and "MASTER_ADDR" not in os.environ:
        # A lone rank needs no port, so it cannot find one taken.
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        return
    bound = device if device.type == "cuda" else None
    dist.init_process_group(backend, timeout=timeout, device_id=bound)
