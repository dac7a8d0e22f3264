"""Contenders take turns at one size, so that all see the same GPU: their times, memory and failures."""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from bench.contenders.sizes import Contender, Sizes, Step, fill, own_part
from bench.roofline import synchronize
from forge.core.machine import Machine
from forge.launch.process_group import World, joined
from forge.launch.rank import Rank


@dataclass
class Result:
    """What a contender did: seconds of each counted step, its memory, the loss of its last step."""

    seconds: list[float] = field(default_factory=list)
    turns: int = 0
    peak_bytes: int = 0
    loss: float = math.nan
    failure: str = ""  # why it has not finished
    is_fault: bool = False  # and whether that is a fault of the bench or the contender

    def fail(self, why: str, *, is_fault: bool = False) -> None:
        """It has no more turns."""
        self.failure, self.is_fault = why.splitlines()[0], is_fault


# --- turns ----------------------------------------------------------------------------------------


class Contest:
    """Rounds in which each contender has one turn.

    Each is built once. Between its turns its weights and optimizer state have no memory, so that large
    models take turns, too, and each has the GPU for itself; in each turn they start anew.
    """

    def __init__(
        self,
        contenders: dict[str, Contender],
        sizes: Sizes,
        world: World,
        record: Callable[[str, Result], object] = lambda name, result: None,
    ) -> None:
        """record: called after each turn, with its contender: the next one may end the process."""
        self.results = {name: Result() for name in contenders}
        self._contenders, self._sizes, self._world = contenders, sizes, world
        self._record = record
        self._asleep: dict[str, Sleeper] = {}
        self._turns_sec = 0.0  # of this round

    def run(self, num_steps: int, max_rounds: int, deadline: float, end: float) -> None:
        """One round, and more while the next one should end by the deadline. No contender is built after
        `end`. Both are times of time.perf_counter."""
        longest = 0.0  # seconds of a round's turns, without what is built
        for number in range(max_rounds):
            if number and time.perf_counter() + longest > deadline:
                break
            self._turns_sec = 0.0
            # To and fro: a GPU that gets slower is so for each of them.
            for name in list(self.results)[:: -1 if number % 2 else 1]:
                if not number and time.perf_counter() > end:
                    self.results[name].fail("left out: the time is up")
                if not self.results[name].failure:
                    self._try_turn(name, num_steps)
            longest = max(longest, self._turns_sec)
        self._asleep.clear()
        torch.compiler.reset()  # else the next sizes count as further shapes of the same functions
        self._free()

    def _try_turn(self, name: str, num_steps: int) -> None:
        """A turn, of which every failure is noted: the next contender has its turn whatever happens."""
        result = self.results[name]
        try:
            self._turn(name, num_steps)
        except torch.OutOfMemoryError:
            result.fail("out of memory")
        except ImportError as err:
            result.fail(f"left out: {err}")
        except Exception as err:
            result.fail(f"failed: {type(err).__name__}: {err}", is_fault=True)
        self._free()  # here, where no exception holds tensors any more
        self._record(name, result)

    def _turn(self, name: str, num_steps: int) -> None:
        sleeper = self._asleep.pop(name, None)  # after a failure nothing of it is left
        if sleeper is None:
            step = self._contenders[name](self._sizes, self._world)
            float(step.take())  # compiles; creates the optimizer state
        else:
            step = sleeper.wake()
        began = time.perf_counter()
        take_turn(step, num_steps, self._world.device, self.results[name])
        self._turns_sec += time.perf_counter() - began
        self._asleep[name] = Sleeper(step)

    def _free(self) -> None:
        gc.collect()
        if self._world.device.type == "cuda":
            torch.cuda.empty_cache()


def take_turn(step: Step, num_steps: int, device: torch.device, result: Result) -> None:
    """Take steps, and add them to the result. One more comes first, which is not counted."""
    on_gpu = device.type == "cuda"
    synchronize(device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    moments = []
    for _ in range(num_steps + 1):
        last = step.take()
        moments.append(Moment(device))
    result.loss = float(last)
    synchronize(device)
    if not math.isfinite(result.loss):
        raise RuntimeError(f"the loss is {result.loss}")
    result.seconds += [later.since(earlier) for earlier, later in itertools.pairwise(moments)]
    result.turns += 1
    if on_gpu:
        result.peak_bytes = max(result.peak_bytes, torch.cuda.max_memory_allocated(device))


class Moment:
    """When a device has done all work given to it so far. The host does not wait for it."""

    def __init__(self, device: torch.device) -> None:
        self._time = time.perf_counter()
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self._event is not None:
            self._event.record()

    def since(self, earlier: Moment) -> float:
        """Seconds; of a GPU once it has reached both."""
        if self._event is None or earlier._event is None:
            return self._time - earlier._time
        return earlier._event.elapsed_time(self._event) / 1e3


class Sleeper:
    """A step whose weights and optimizer state have given back their memory. Its graphs stay compiled."""

    def __init__(self, step: Step) -> None:
        self._step = step
        step.optimizer.zero_grad(set_to_none=True)
        self._sizes = [storage.nbytes() for storage in _storages(step)]
        for storage in _storages(step):
            storage.resize_(0)

    def wake(self) -> Step:
        """The step with its first weights, and with an optimizer state of zeros."""
        for storage, size in zip(_storages(self._step), self._sizes, strict=True):
            storage.resize_(size)
            storage.fill_(0)
        fill(self._step.model)
        return self._step


def _storages(step: Step) -> list[torch.UntypedStorage]:
    """Of weights and of the optimizer's moments, not of its step counters."""
    moments = [value for state in step.optimizer.state.values() for value in state.values()]
    tensors = [*step.model.parameters(), *(m for m in moments if isinstance(m, Tensor) and m.dim())]
    return [own_part(tensor.detach()).untyped_storage() for tensor in tensors]


# --- ranks ----------------------------------------------------------------------------------------


@contextmanager
def world_of(sizes: Sizes) -> Iterator[World]:
    """The ranks of these sizes, of which this process is rank 0. Of several the others do not exist."""
    if sizes.ranks > 1:
        with pretended(sizes.ranks) as world:
            yield world
    else:
        with joined(Rank(0, 0, 1, 1), Machine()) as world:
            yield world


@contextmanager
def pretended(num_ranks: int) -> Iterator[World]:
    """Rank 0 of ranks that do not exist: torch's process group `fake`, which does not communicate.

    Shapes, memory and computation are those of a real rank. An all-gather repeats this rank's part: the
    gathered weights of a block do exist, in full size and as briefly as in training, and are finite; they
    only are no model that anyone would train. Writing them takes the GPU's bandwidth, as a real
    all-gather does. A reduce-scatter keeps this rank's part, an all-reduce leaves everything as it is.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    assert dist.group.WORLD is not None
    names = ("reduce_scatter_tensor", "reduce_scatter_single")  # of torch 2.11, and of 2.13
    try:
        with patch.multiple(dist, **{name: _keep_part for name in names if hasattr(dist, name)}):
            rank = Rank(0, 0, num_ranks, min(8, num_ranks))
            yield World(rank, device, "fake", dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def _keep_part(output: Tensor, input: Tensor, **_: object) -> None:
    """A reduce-scatter for rank 0 alone. That of `fake` leaves the output unwritten in torch 2.11: a NaN
    there slows nothing down, but Forge's step would skip its update."""
    output.copy_(input[: len(output)])
