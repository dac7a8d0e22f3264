"""The program that every contender keeps training: plain DDP, and each step lasts as long as --step-sec.

A launcher sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, and starts this file by its
path: its directory is then on sys.path, and nothing of Forge is needed. Rank 0 appends to steps.jsonl in
--folder {"time", "launch", "start", "resumed", "corrupt"} when it starts, and then {"time", "launch",
"start", "step", "chain"} after each step. A checkpoint is a directory checkpoint-STEP with a file of
every rank.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from chain import SAMPLES_PER_RANK, START, link, samples_of  # type: ignore[import-not-found]
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

WIDTH = 512  # of one square matrix: its gradients are the all-reduce of 1 MiB


@dataclass
class State:
    """What a checkpoint has: the model, the samples trained on so far, and their chain."""

    model: nn.Module
    step: int = 0
    position: int = 0
    chain: str = START


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="of steps.jsonl")
    parser.add_argument("--checkpoints", type=Path, help="default: checkpoints in --folder")
    parser.add_argument("--resume", help="a checkpoint, or '' for a fresh start; default: newest")
    parser.add_argument("--steps", type=int, default=10**6)
    parser.add_argument("--step-sec", type=float, default=0.5, help="a step lasts at least so long")
    parser.add_argument("--save-every-sec", type=float, default=30.0, help="of paced steps")
    parser.add_argument("--mib", type=int, default=64, help="of a checkpoint, a rank")
    parser.add_argument("--keep", type=int, default=3, help="checkpoints; 0: all")
    parser.add_argument("--timeout-sec", type=float, default=20.0, help="of the process group")
    parser.add_argument(
        "--save-on-sigterm", action="store_true", help="save and exit with 0 at SIGTERM"
    )
    return parser.parse_args()


def newest(checkpoints: Path, world_size: int) -> Path | None:
    """The checkpoint of the highest step that has a file of each rank, as careful scripts choose it."""
    found = [
        (int(match[1]), path)
        for path in checkpoints.glob("checkpoint-*")
        if (match := re.fullmatch(r"checkpoint-(\d+)", path.name))
        and all((path / f"rank{rank}.pt").exists() for rank in range(world_size))
    ]
    return max(found)[1] if found else None


def save(state: State, checkpoints: Path, options: argparse.Namespace) -> None:
    """Every rank writes its file, under a temporary name first; all return when all have written."""
    rank = dist.get_rank()
    folder = checkpoints / f"checkpoint-{state.step}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank{rank}.pt"
    values: dict[str, Any] = {
        **{"step": state.step, "position": state.position, "chain": state.chain},
        "model": state.model.state_dict(),
        # In place of optimizer state. One value throughout, by which a load sees corruption.
        "payload": torch.full((options.mib * 2**18,), float(state.step)),
    }
    torch.save(values, path.with_suffix(".writing"))
    path.with_suffix(".writing").replace(path)
    tell("FORGE_SAVED", state.step)
    dist.barrier()
    if rank == 0 and options.keep:
        kept = sorted(checkpoints.glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))
        for old in kept[: -options.keep]:
            shutil.rmtree(old, ignore_errors=True)


def load(state: State, checkpoint: Path) -> bool:
    """Whether the rank's file is corrupt although it could be read."""
    values = torch.load(checkpoint / f"rank{dist.get_rank()}.pt")
    state.model.load_state_dict(values["model"])
    state.step, state.position, state.chain = (values[k] for k in ("step", "position", "chain"))
    return bool((values["payload"] != float(state.step)).any())


def tell(variable: str, step: int) -> None:
    """Write the step where a launcher asks for it by this variable; nobody else sets one."""
    if path := os.environ.get(variable):
        Path(path).write_text(str(step))


class StepLog:
    """steps.jsonl: rank 0 appends to it, a line in one write."""

    def __init__(self, folder: Path, start: int) -> None:
        self._path = folder / "steps.jsonl"
        self._same = {"launch": secrets.token_hex(4), "start": start}

    def write(self, **values: object) -> None:
        if dist.get_rank() == 0:
            line = json.dumps({"time": time.time(), **self._same, **values}) + "\n"
            with open(self._path, "a") as file:
                file.write(line)


def train_step(state: State, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step on the next samples, whose numbers all ranks gather for the chain."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    samples = torch.tensor(samples_of(state.position, rank))
    optimizer.zero_grad()
    inputs = torch.sin(samples[:, None] * torch.arange(1, WIDTH + 1) / WIDTH)
    model(inputs).square().mean().backward()
    optimizer.step()
    gathered = [torch.empty_like(samples) for _ in range(world_size)]
    dist.all_gather(gathered, samples)
    state.step += 1
    state.position += world_size * SAMPLES_PER_RANK
    state.chain = link(state.chain, state.step, torch.cat(gathered).tolist())


def any_rank(flag: bool) -> bool:
    """A signal reaches ranks one by one: all must agree on the step at which they stop."""
    value: Tensor = torch.tensor(int(flag))
    dist.all_reduce(value)
    return bool(value)


def main() -> None:
    options = arguments()
    asked: list[int] = []
    if options.save_on_sigterm:
        signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=options.timeout_sec))
    torch.manual_seed(0)
    state = State(nn.Linear(WIDTH, WIDTH, bias=False))
    checkpoints = options.checkpoints or options.folder / "checkpoints"
    resume = options.resume
    if resume is None:
        resume = newest(checkpoints, dist.get_world_size())
    corrupt = any_rank(load(state, Path(resume)) if resume else False)
    model = DistributedDataParallel(state.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    log = StepLog(options.folder, state.step)
    log.write(resumed=str(resume or ""), corrupt=corrupt)
    save_every = max(1, round(options.save_every_sec / options.step_sec))
    stop = False
    while state.step < options.steps and not stop:
        begin = time.monotonic()
        train_step(state, model, optimizer)
        stop = any_rank(bool(asked))
        time.sleep(max(0.0, options.step_sec - (time.monotonic() - begin)))
        log.write(step=state.step, chain=state.chain)
        tell("FORGE_HEARTBEAT", state.step)
        if stop or state.step % save_every == 0 or state.step >= options.steps:
            save(state, checkpoints, options)
    with contextlib.suppress(RuntimeError):  # a peer may have left already
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
