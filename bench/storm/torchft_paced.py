"""torchft's version of the paced program: a replica group is one rank, and trains on when others die.

After train_ddp.py of torchft: its Manager and Optimizer. Gradients are reduced by the manager, since
torchft's DistributedDataParallel (0.2.0) ends the survivors with an AssertionError where Gloo tells of a
lost peer. The samples are a function of (step, group), so those of a group that is away are lost, as
torchft says of its own sampler. Every group appends to steps.jsonl what it has contributed to a
committed step: {"time", "launch", "start", "group", "step", "samples"}; useful work is the number of
distinct samples.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import paced  # type: ignore[import-not-found]
import torch
from chain import SAMPLES_PER_RANK, samples_of  # type: ignore[import-not-found]
from torch import nn
from torchft import Manager, Optimizer, ProcessGroupGloo  # type: ignore[import-not-found]

GROUP, GROUPS = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])
SILENT_SEC = 5  # after which a collective gives up on a group


class Replica:
    """The state of one replica group, and its manager."""

    def __init__(self, mib: int, timeout_sec: float) -> None:
        torch.manual_seed(0)
        self.net = nn.Linear(paced.WIDTH, paced.WIDTH, bias=False)
        self.payload = torch.zeros(mib * 2**18)  # in place of optimizer state
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=timedelta(seconds=SILENT_SEC)),
            min_replica_size=1,
            state_dict=self.state_dict,
            load_state_dict=self.load_state_dict,
            replica_id=f"paced_{GROUP}",
            timeout=timedelta(seconds=timeout_sec),
        )
        sgd = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.optimizer = Optimizer(self.manager, sgd)

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.net.state_dict(), "payload": self.payload}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.net.load_state_dict(values["model"])
        self.payload = values["payload"]

    def resume(self, checkpoints: Path) -> Path | None:
        """From the newest checkpoint, which has the manager's state, too."""
        found = sorted(checkpoints.glob("checkpoint-*.pt"), key=lambda p: int(p.stem[11:]))
        if not found:
            return None
        values = torch.load(found[-1])
        self.load_state_dict(values)
        self.manager.load_state_dict(values["torchft"])
        return found[-1]

    def save(self, checkpoints: Path, keep: int) -> None:
        checkpoints.mkdir(exist_ok=True)
        path = checkpoints / f"checkpoint-{self.manager.current_step()}.pt"
        values = {**self.state_dict(), "torchft": self.manager.state_dict()}
        torch.save(values, path.with_suffix(".writing"))
        path.with_suffix(".writing").replace(path)
        found = sorted(checkpoints.glob("checkpoint-*.pt"), key=lambda p: int(p.stem[11:]))
        for old in found[:-keep]:
            old.unlink(missing_ok=True)

    def train_step(self) -> list[int]:
        """The samples that this group has contributed to the step, if the groups have committed one."""
        self.optimizer.zero_grad()  # starts the quorum
        step = self.manager.current_step()
        samples: list[int] = samples_of(step * GROUPS * SAMPLES_PER_RANK, GROUP)
        width = torch.arange(1, paced.WIDTH + 1) / paced.WIDTH
        self.net(torch.sin(torch.tensor(samples)[:, None] * width)).square().mean().backward()
        self.manager.allreduce(self.net.weight.grad).wait()
        self.optimizer.step()
        # A group that has just received the state of another one contributes zeros to that step.
        is_in = self.manager.is_participating() and self.manager.current_step() == step + 1
        return samples if is_in else []


def main() -> None:
    options = paced.arguments()
    torch.set_num_threads(1)
    replica = Replica(options.mib, options.timeout_sec)
    checkpoints = options.folder / "checkpoints"
    resumed = replica.resume(checkpoints)
    manager = replica.manager
    same = {"launch": secrets.token_hex(4), "start": manager.current_step(), "group": GROUP}

    def write(**values: object) -> None:
        with open(options.folder / "steps.jsonl", "a") as file:
            file.write(json.dumps({"time": time.time(), **same, **values}) + "\n")

    write(resumed=str(resumed or ""), corrupt=False)
    save_every = max(1, round(options.save_every_sec / options.step_sec))
    while manager.current_step() < options.steps:
        begin = time.monotonic()
        samples = replica.train_step()
        time.sleep(max(0.0, options.step_sec - (time.monotonic() - begin)))
        if samples:
            write(step=manager.current_step(), samples=samples)
        # One of those that are there: all have the same state.
        if (
            samples
            and manager.current_step() % save_every == 0
            and not manager.participating_rank()
        ):
            replica.save(checkpoints, options.keep)


if __name__ == "__main__":
    main()
