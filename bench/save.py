"""How long does a checkpoint stop training, and how long until it is committed? Ratios of medians.

python -m bench.save [--quick] [--folder DIR]    about 6 min; needs 2 GiB of disk, 5 GiB of memory
"""

from __future__ import annotations

import argparse
import itertools
import os
import pickle
import shutil
import socket
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from bench.manifests import manifest_of
from forge.checkpoint import storage
from forge.checkpoint.async_saver import Saver
from forge.core.machine import Machine
from forge.core.models.llama import Llama
from forge.core.paths import RunPaths
from forge.core.train_settings import Train
from forge.launch.process_group import World, joined
from forge.launch.rank import Rank
from forge.launch.torch_private import unpickle_objects_with
from forge.trainer import numerics
from forge.trainer.initialize import initialized
from forge.trainer.optim import make_optimizers

MIB = 2**20
Seconds = dict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="16 MB, one round")
    parser.add_argument(
        "--folder", type=Path, help="where to write (default: the temporary folder)"
    )
    options = parser.parse_args()
    sizes, rounds = ((16,), 1) if options.quick else ((512, 2048), 9)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for mib, ranks in [*((mib, 1) for mib in sizes), (sizes[0], 2)]:
            plan = Plan(
                ranks, free_port(), mib, max(min(3, rounds), rounds * sizes[0] // mib), Path(folder)
            )
            mp.spawn(measure, args=(plan,), nprocs=ranks)


class Plan(NamedTuple):
    """One table: so many ranks that meet at a port, MiB of state, rounds, and where to write."""

    ranks: int
    port: int
    mib: int
    rounds: int
    folder: Path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measure(number: int, plan: Plan) -> None:
    """One rank's part; rank 0 prints the table."""
    ranks, port, mib, rounds, folder = plan
    environ = {"RANK": number, "WORLD_SIZE": ranks, "LOCAL_RANK": number, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in environ.items()}
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    numerics.keep_freed_memory()
    rank = Rank(number, number, ranks, ranks)
    with joined(rank, Machine(device="cpu")) as world:
        bench = Bench(world, folder, mib)
        for _ in range(1 + rounds):  # the first round apart: it makes the buffers
            bench.round()
        if rank.is_main:
            print(f"\n{mib} MB of state, {ranks} rank(s), {rounds} rounds", flush=True)
            tell({name: times[1:] for name, times in bench.seconds.items()}, bench.stall_of_first)


class NoDigest:
    """In the place of blake3, for the price of it."""

    def update(self, data: object) -> None:
        pass

    def hexdigest(self) -> str:
        return ""


class Bench:
    """A state of the wished size, like a model's, and everything that is done with it in a round."""

    def __init__(self, world: World, folder: Path, mib: int) -> None:
        self.world, self.folder = world, folder
        self.paths = RunPaths(folder / f"run-{mib}-{world.rank.world_size}")
        self.state = make_state(mib)
        self.tensors = list(leaves(self.state))
        self.copies = [torch.empty_like(tensor) for tensor in self.tensors]
        self.savers = {
            beside: Saver(world, self.paths, async_save=beside, check_may_write=lambda: None)
            for beside in (False, True)
        }
        self.seconds: Seconds = defaultdict(list)
        manifest = manifest_of(1)
        self.manifests = (manifest.model_copy(update={"step": step}) for step in itertools.count(1))
        self.step = training_step()
        self.stall_of_first = 0.0

    def round(self) -> None:
        """Each measurement once, on a quiet disk. All ranks call it."""
        mine = {
            "copy": self.copy,
            "raw write": self.raw_write,
            "forge, waiting": lambda: self.save(beside=False),
            "the same without digests": self.save_without_digests,
            "forge, beside": lambda: self.save(beside=True),
            "dcp.save": lambda: self.dcp_save(1),
            "dcp.async_save": lambda: self.dcp_async(AsyncCheckpointerType.THREAD),
        }
        for name, action in mine.items():
            self.world.on_main(lambda: shutil.rmtree(self.folder / "other", ignore_errors=True))
            os.sync()
            self.world.barrier()
            started = time.perf_counter()
            total = action()
            self.seconds[name].append(total or time.perf_counter() - started)
        self.rates()

    def copy(self) -> None:
        for copy, tensor in zip(self.copies, self.tensors, strict=True):
            copy.copy_(tensor)

    def raw_write(self) -> None:
        """The bytes of this rank's share, one after another into one file, and one fsync."""
        rank = self.world.rank
        path = self.folder / f"raw-{rank.rank}"
        with open(path, "wb", buffering=0) as file:
            for tensor in self.tensors[rank.rank :: rank.world_size]:
                file.write(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
            os.fsync(file.fileno())
        path.unlink()

    def save(self, *, beside: bool) -> float:
        """Through to the commit; the stall of one during training goes to a row of its own."""
        saver = self.savers[beside]
        started = time.perf_counter()
        saver.start(self.state, next(self.manifests), keep_last=1, last=not beside)
        if beside:
            self.seconds["  stall"].append(time.perf_counter() - started)
            self.stall_of_first = self.seconds["  stall"][0]
        saver.finish()
        return time.perf_counter() - started

    def save_without_digests(self) -> float:
        with mock.patch.object(storage, "blake3", SimpleNamespace(blake3=NoDigest)):
            return self.save(beside=False)

    def dcp_save(self, threads: int) -> None:
        unpickle_objects_with(pickle.Unpickler)  # as torch has it; Forge's own saves set theirs
        writer = dcp.FileSystemWriter(self.folder / "other", thread_count=threads)
        dcp.save(self.state, storage_writer=writer)

    def dcp_async(self, kind: AsyncCheckpointerType) -> float:
        unpickle_objects_with(pickle.Unpickler)
        started = time.perf_counter()
        writer = dcp.FileSystemWriter(self.folder / "other")
        saving: Any = dcp.async_save(
            self.state, storage_writer=writer, async_checkpointer_type=kind
        )
        self.seconds["  its stall"].append(time.perf_counter() - started)
        saving.result()
        return time.perf_counter() - started

    def rates(self) -> None:
        """Training steps a second, alone, and while a save is under way; with all cores, and with
        half of them, since beside a GPU there are cores to spare."""
        all_threads = torch.get_num_threads()
        for cores, threads in (("half", all_threads // 2), ("all", all_threads)):
            if not threads:
                continue
            torch.set_num_threads(threads)
            alone, _ = self.rate(None)
            saving, seconds = self.rate(self.savers[True])
            self.seconds[f"steps/s alone, {cores}"].append(alone)
            self.seconds[f"steps/s saving, {cores}"].append(saving)
            self.seconds[f"a save beside it, {cores}"].append(seconds)
        torch.set_num_threads(all_threads)

    def rate(self, saver: Saver | None) -> tuple[float, float]:
        """Steps a second between the stalls of a save, or for a second; and the seconds that it takes."""
        started = time.perf_counter()
        if saver:
            saver.start(self.state, next(self.manifests), keep_last=1)
        begun, steps = time.perf_counter(), 0
        while not saver.is_done() if saver else time.perf_counter() < begun + 1:
            self.step()
            steps += 1
        ended = time.perf_counter()
        if saver:
            saver.finish()
        return steps / (ended - begun), time.perf_counter() - started


def make_state(mib: int) -> dict[str, dict[str, Any]]:
    """Weights and moments of a decoder of dim 1024, about `mib` MiB in all."""
    state: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}}
    shapes = [*[(1024, 1024)] * 4, *[(2816, 1024)] * 3, (1024,), (1024,)]
    for number in itertools.count():
        for part, shape in enumerate(shapes):
            name = f"layers.{number}.{part}.weight"
            state["model"][name] = torch.randn(shape)
            state["optimizer"][name] = {
                "step": torch.tensor(1.0),
                "exp_avg": torch.randn(shape),
                "exp_avg_sq": torch.rand(shape),
            }
            if storage.state_bytes(state) >= mib * MIB:
                return state
    raise AssertionError


def leaves(state: dict[str, Any]) -> Iterator[torch.Tensor]:
    for value in state.values():
        yield from leaves(value) if isinstance(value, dict) else (value,)


def training_step() -> Callable[[], None]:
    """A step of a small model on all threads, some 10 ms long."""
    model = initialized(Llama(dim=128, layers=2), 512)
    (optimizer,) = make_optimizers(model, Train())
    tokens = torch.randint(512, (4, 129), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def tell(seconds: Seconds, stall_of_first: float) -> None:
    """Medians and the ratios that matter."""
    median = {name: statistics.median(times) for name, times in seconds.items()}
    for name, value in median.items():
        low, high = min(seconds[name]), max(seconds[name])
        print(f"  {name:28}{value:9.3f}   ({low:.3f} to {high:.3f})")
    stall, waiting = median["  stall"], median["forge, waiting"]
    ratios = {
        "stall / copy": stall / median["copy"],
        "first stall / copy": stall_of_first / median["copy"],
        "waiting save / stall": waiting / stall,
        "waiting / raw write": waiting / median["raw write"],
        "beside / raw write": median["forge, beside"] / median["raw write"],
        "with digests / without": waiting / median["the same without digests"],
    }
    for cores in ("half", "all"):
        if f"steps/s alone, {cores}" not in median:
            continue
        alone, saving = median[f"steps/s alone, {cores}"], median[f"steps/s saving, {cores}"]
        ratios[f"rate while saving, {cores}"] = saving / alone
        lost = (1 - saving / alone) * median[f"a save beside it, {cores}"]
        ratios[f"seconds lost a save, {cores}"] = lost
    for name, ratio in ratios.items():
        print(f"  {name:28}{ratio:9.2f}")


if __name__ == "__main__":
    main()
