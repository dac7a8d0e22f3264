"""Device, process groups and collectives of the ranks of one launch (torch.distributed)."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import torch
import torch.distributed as dist
from pydantic import ConfigDict, TypeAdapter, ValidationError

from forge.core.errors import UnfitError
from forge.core.machine import Machine
from forge.hosts.network import FLIGHT_RECORDER
from forge.hosts.rendezvous import JoinError
from forge.launch.device import Seen, choose
from forge.launch.heartbeat import LastCollectives, heartbeat
from forge.launch.rank import Rank
from forge.launch.rank_records import SAME_VERSION
from forge.launch.torchrun import store_at

T = TypeVar("T")

# The name since torch 2.13, where the old one is deprecated.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Timeout for ranks that wait for the file access of others, unless fabric.timeout_sec is longer. A lost
# rank is detected sooner, see World.wait_for.
SLOWEST_DISK_SEC = 3600.0
POLL_SEC = 0.005
# When an action fails on one rank, the background threads of the others fail within this time.
FAILURE_SEC = 5.0


class PeerFailed(RuntimeError):
    """Another rank failed (its record says why), is lost, or does not respond. activity: what this rank
    did when it noticed. status: of this rank's record."""

    status: Literal["failed", "lost"] = "failed"

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.activity = heartbeat.activity


class HoldsUpPeers(PeerFailed):
    """The work of this rank is not done although the other ranks have waited for it to their deadline."""

    status = "lost"

    def __init__(self, work: str, sec: float) -> None:
        super().__init__(f"{work}: this rank is not done after {sec:.0f} s")
        self.activity = replace(self.activity, phase=work, waits=False, sec=sec, stalled=True)


def is_peer_loss(error: BaseException) -> bool:
    """Return whether the error only means that another rank is lost or does not respond."""
    if isinstance(error, PeerFailed | dist.DistError):
        return True
    # Gloo raises plain RuntimeErrors that name their source file.
    return isinstance(error, RuntimeError) and "gloo" in str(error).lower()


@contextmanager
def named(what: str) -> Iterator[None]:
    """Name a collective, for the heartbeat; when it fails because of another rank, raise PeerFailed with
    `what`.

    The launcher finds out which rank: the one that has no record, or was elsewhere.
    """
    heartbeat.beat(what, waits=True)
    work: Background[Any] | None = getattr(_this_thread, "work", None)
    try:
        if work:
            work.waits = True
        yield
    except RuntimeError as err:
        if not is_peer_loss(err) or isinstance(err, PeerFailed):
            raise
        raise PeerFailed(f"{what}: {_reason(err)}") from err
    finally:
        if work:
            work.waits = False
    heartbeat.beat(f"work after {what}")


def _reason(err: RuntimeError) -> str:
    """The error of Gloo, without its source file and its advice."""
    said = " ".join(str(err).split())
    return (said.partition("] ")[2] or said).partition(". This is typically")[0]


def dump_collectives(world: World) -> None:
    """Write torch's flight recorder, this rank's last collectives, to the file that torch itself writes
    at a timeout of NCCL. `torchfrtrace` reads those of all ranks.

    A rank that waits in the control group, which is Gloo's, may exit before NCCL's timeout has come.
    """
    # Not at the top: it loads torch.distributed.checkpoint, which preflight does not need.
    from forge.launch.torch_private import flight_record

    record = flight_record(world.backend)
    Path(f"{os.environ[FLIGHT_RECORDER]}{world.rank.rank}").write_bytes(record)


def collectives(world: World) -> tuple[LastCollectives, ...]:
    """Last collectives of this rank in each process group."""
    from forge.launch.torch_private import collective_numbers

    kinds = ("enqueued", "started", "completed")
    return tuple(
        LastCollectives(group, *(int(numbers[f"last_{kind}_collective"]) for kind in kinds))
        for group, numbers in collective_numbers(world.backend).items()
    )


_this_thread = threading.local()  # .work: the Background that it runs


class Background(Generic[T]):
    """Runs an action in a thread, which starts at once. waits: for other ranks, in a collective."""

    def __init__(self, action: Callable[[], T], name: str) -> None:
        self.waits = False
        self._action = action
        self._value: T | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        _this_thread.work = self
        try:
            self._value = self._action()
        except BaseException as err:  # torch's CheckpointException is not an Exception
            self.error = err

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    @property
    def value(self) -> T:
        """The result of the action, or its exception, raised. Only when it is done."""
        assert self.is_done
        if self.error is not None:
            raise self.error
        return self._value  # type: ignore[return-value]

    def join(self, timeout_sec: float) -> None:
        self._thread.join(timeout_sec)


@dataclass(frozen=True)
class World:
    """All ranks after the rendezvous. `control` is a Gloo group for flags and objects, on CPU."""

    rank: Rank
    device: torch.device
    backend: str
    control: dist.ProcessGroup

    def with_own_group(self) -> World:
        """The same ranks with another control group, for a background thread. All ranks call it.

        Its timeout is longer than `wait_for`, which names the rank whose disk does not answer.
        """
        timeout = timedelta(seconds=2 * _patience_sec())
        return replace(self, control=dist.new_group(backend="gloo", timeout=timeout))

    def limit_timeout(self, group: dist.ProcessGroup) -> None:
        """Let collectives of a group that torch has made end with an error after fabric.timeout_sec."""
        from forge.launch.torch_private import set_timeout  # imports all of DCP

        if math.isfinite(heartbeat.timeout_sec):
            set_timeout(group, timedelta(seconds=heartbeat.timeout_sec))

    def gather(self, values: list[float], what: str = "agreement") -> list[list[float]]:
        """A few numbers of every rank, by rank. All ranks call it.

        what: name of this collective in the error when a rank does not take part.
        """
        own = torch.tensor(values, dtype=torch.float64)
        everyone = [torch.empty_like(own) for _ in range(self.rank.world_size)]
        with named(what):
            dist.all_gather(everyone, own, group=self.control)
        return [row.tolist() for row in everyone]

    @property
    def runs_ahead(self) -> bool:
        """Return whether collectives on the device return before they are done: not with Gloo."""
        return self.backend != "gloo"

    def on_device(self, values: Sequence[float]) -> torch.Tensor:
        """A few numbers as fp32 on this rank's device, without waiting for the copy."""
        on_gpu = self.device.type == "cuda"
        numbers = torch.tensor(values, dtype=torch.float32, pin_memory=on_gpu)
        return numbers.to(self.device, non_blocking=True)

    def gather_on_device(self, values: torch.Tensor, what: str) -> torch.Tensor:
        """A few numbers of every rank, by rank: [W, len(values)] on the device. All ranks call it.

        With NCCL the host does not wait for them. what: as in `gather`.
        """
        if self.rank.world_size == 1:
            return values[None]
        # Gloo has no all-gather for GPUs.
        own = values if self.runs_ahead else values.cpu()
        everyone = own.new_empty(self.rank.world_size * len(own))  # Gloo takes no table
        with named(what):
            _all_gather(everyone, own)
        return everyone.view(self.rank.world_size, -1).to(self.device)

    def gather_objects(self, value: T, kind: Any, what: str) -> list[T]:
        """The value of every rank, by rank. All ranks call it.

        As JSON, because bytes of another process are never unpickled. kind: the type of the values, such
        as `list[str]`. Raises UnfitError where a rank sent none of that type.
        """
        adapter = TypeAdapter(kind, config=ConfigDict(ser_json_inf_nan="constants"))
        data = adapter.dump_json(value)
        sizes = [int(row[0]) for row in self.gather([len(data)], what)]
        padded = torch.frombuffer(bytearray(data.ljust(max(sizes))), dtype=torch.uint8)
        everyone = [torch.empty_like(padded) for _ in sizes]
        with named(what):
            dist.all_gather(everyone, padded, group=self.control)
        try:
            return [adapter.validate_json(table.numpy().tobytes()) for table in everyone]
        except ValidationError as err:
            raise UnfitError(
                f"{what}: a rank sent no {kind}: {' '.join(str(err).split()):.200}",
                cause="the nodes have different versions of Forge",
                fix=SAME_VERSION,
            ) from None

    def together(self, action: Callable[[], T], what: str = "agreement") -> T:
        """Run `action` on every rank; when it fails on one, raise on all. All ranks call it.

        Raises the exception of `action`, or PeerFailed where it succeeded: those ranks would else wait
        in the next collective for a rank that has exited.
        """
        heartbeat.beat(what)
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
        """Run `action` on rank 0 while the others wait. All ranks call it; raises as `together`."""
        self.together(action if self.rank.is_main else lambda: None, what)

    def wait_for(self, work: Background[T], what: str) -> T:
        """Wait until the work of every rank is done or that of one has failed; raises as `together`.

        All ranks call it. A stopped or lost rank is detected within fabric.timeout_sec, however long the
        work of another takes, because the main threads keep exchanging their state. Work that is not done
        after SLOWEST_DISK_SEC, or fabric.timeout_sec where that is longer, raises HoldsUpPeers on its
        ranks and PeerFailed, which names them, on the others.
        """
        start, patience_sec = time.monotonic(), _patience_sec()
        while True:
            done = work.is_done  # read once: the work may fail between two reads
            failed = done and work.error is not None
            late = time.monotonic() - start > patience_sec
            holds_up = not (done or work.waits)
            table = self.gather([*map(float, (done, failed, late, holds_up))], what)
            # All ranks have this table, so all raise here.
            if any(row[1] for row in table):
                # The work of a rank may fail a moment later than that of the others.
                work.join(FAILURE_SEC)
                where = [rank for rank, row in enumerate(table) if row[1]]
                raise work.error or PeerFailed(f"{what}: it failed on rank {where[0]}")
            if all(row[0] for row in table):
                return work.value
            if any(row[2] for row in table):
                raise self._overdue(table, what, time.monotonic() - start)
            work.join(POLL_SEC)

    def _overdue(self, table: list[list[float]], what: str, sec: float) -> PeerFailed:
        """The error of this rank when work is not done in time. table: as in `wait_for`; a rank whose
        work only waits for that of others does not hold them up."""
        ranks = range(len(table))
        who = [rank for rank in ranks if table[rank][3]] or [r for r in ranks if not table[r][0]]
        if self.rank.rank in who:
            return HoldsUpPeers(what, sec)
        return PeerFailed(
            f"{what}: rank {', '.join(map(str, who))} did not arrive after {sec:.0f} s"
        )

    def patiently(self, action: Callable[[], T], what: str) -> T:
        """`together` for an action that may take long, such as file access. All ranks call it; an action
        with collectives needs a world `with_own_group`."""
        if self.device.type != "cuda":
            return self.wait_for(Background(action, what), what)

        def on_device() -> T:
            torch.cuda.set_device(self.device)  # a new thread has device 0
            return action()

        return self.wait_for(Background(on_device, what), what)

    def barrier(self, what: str = "barrier") -> None:
        """All ranks wait for each other."""
        with named(what):
            dist.barrier(group=self.control)


def _patience_sec() -> float:
    """Seconds for which ranks wait for work of others, such as file access."""
    timeout_sec = heartbeat.timeout_sec if math.isfinite(heartbeat.timeout_sec) else 0
    return max(SLOWEST_DISK_SEC, timeout_sec)


@contextmanager
def joined(rank: Rank, machine: Machine) -> Iterator[World]:
    """Rendezvous of all ranks within fabric.timeout_sec; leaves the group at the end. All call it.

    Raises JoinError when the rendezvous fails, and as device.choose does.
    """
    timeout = timedelta(seconds=machine.fabric.timeout_sec)
    heartbeat.timeout_sec = machine.fabric.timeout_sec
    seen = Seen.here(rank, machine.device)
    try:
        store = _store(rank, timeout)
        device = choose(_exchanged(seen, rank, store), rank, machine)
        on_gpu = device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(device)
        backend = machine.fabric.backend
        if backend == "auto":
            backend = "nccl" if on_gpu else "gloo"
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("default", store),
            rank=rank.rank,
            world_size=rank.world_size,
            timeout=timeout,
            device_id=device if backend == "nccl" else None,
        )
        control = dist.group.WORLD
        if backend != "gloo":  # the default timeout of a new group is 30 minutes
            control = dist.new_group(backend="gloo", timeout=timeout)
    except (dist.DistError, RuntimeError, ValueError, OSError) as err:
        master = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise JoinError(
            f"rank {rank.rank} of {rank.world_size} could not join at {master}: {err}",
            cause="a rank did not start, or the interface"
            f" {os.environ.get('GLOO_SOCKET_IFNAME', '(torch chose it)')} does not reach the others",
            fix="name the network that all nodes share: fabric.interface, fabric.interfaces or"
            " fabric.master_addr in profiles/README.md",
        ) from err
    assert control is not None
    yield World(rank, device, backend, control)
    # Not after an error: a thread may still be in a collective, and the process exits anyway.
    dist.destroy_process_group()


def _store(rank: Rank, timeout: timedelta) -> dist.Store:
    """The key-value store at the rendezvous endpoint of the environment, through which ranks meet."""
    if rank.world_size == 1:
        return dist.HashStore()  # a single rank needs no port, so none can be taken
    of_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if rank.is_main and rank.world_size == rank.local_world_size and not of_torchrun:
        # The rendezvous shares its server. Without it, rank 0 would listen on all interfaces.
        _own = store_at(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    return store


def _exchanged(own: Seen, rank: Rank, store: dist.Store) -> list[Seen]:
    """Devices of each rank, by rank. Through the store: no backend works before the device is chosen."""
    store.set(f"seen by {rank.rank}", json.dumps(asdict(own)))
    ranks = range(rank.world_size)
    everyone = [Seen(**json.loads(store.get(f"seen by {number}"))) for number in ranks]
    store.set(f"read by {rank.rank}", "")
    if rank.is_main:  # it may raise next, and the store ends with its process
        store.wait([f"read by {number}" for number in ranks])
    return everyone
