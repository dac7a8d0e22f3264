"""A small FSDP2 training with the checkpoints, the resume, the output and the signals of KempnerForge or
torchtitan, by torch.distributed.checkpoint as they call it (commits 5666d0d and b5bcd76).

One thing differs from KempnerForge: the ranks agree on the step at which they stop. There each rank looks
by itself, which now and then hangs.
"""

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("layout", choices=("kempnerforge", "torchtitan"))
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--folder", type=Path, required=True)
parser.add_argument("--interval", type=int, default=5)
parser.add_argument("--sleep", type=float, default=0.05)
parser.add_argument("--async-save", action="store_true")
parser.add_argument("--give-up-at", type=int, help="end at this step, with exit status 0")
parser.add_argument("--kill-in-save", type=int, help="kill -9 of the last rank in this save ...")
parser.add_argument("--once", type=Path, help="... only while this file is not there")
options = parser.parse_args()
is_kempnerforge = options.layout == "kempnerforge"

asked = []
if is_kempnerforge:
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    signal.signal(signal.SIGUSR1, lambda number, _: asked.append(number))


def say(text):
    if rank == 0 or not is_kempnerforge:
        print(f"[rank {rank}] {text}", flush=True)


class Writer(dcp.FileSystemWriter):
    """DCP's own, and a kill -9 of the last rank when its file is written, before the index is."""

    def __init__(self, at):
        super().__init__(folder_of(at))
        self.at = at  # the program may be steps ahead when a file is written in the background

    def write_data(self, plan, planner):
        written = super().write_data(plan, planner)
        if self.at == options.kill_in_save and rank == world_size - 1 and not options.once.exists():
            while not any(options.folder.glob("*.forge.json")):  # an older one to resume from
                time.sleep(0.1)
            options.once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return written


def folder_of(at):
    return options.folder / (f"step_{at}" if is_kempnerforge else f"step-{at}")


def state():
    weights, optimizer_state = get_state_dict(model, optimizer)
    if is_kempnerforge:
        return {"model": weights, "optimizer": optimizer_state}
    train_state = {"step": torch.tensor(step), "ntokens_seen": 8 * step}
    return {**weights, "optimizer": optimizer_state, "train_state": train_state}


def save():
    """As both do: wait for the save before, begin this one; KempnerForge's rank 0 adds two files, and
    moves `latest` when the index is there."""
    finish()
    folder_of(step).mkdir(parents=True, exist_ok=True)
    arguments = {"storage_writer": Writer(step), "process_group": group}
    if options.async_save:
        pending.append((dcp.async_save(state(), **arguments), step))
    else:
        dcp.save(state(), **arguments)
    if is_kempnerforge and rank == 0:
        torch.save({"step": step, "tokens_seen": 8 * step}, folder_of(step) / "train_state.pt")
        (folder_of(step) / "metadata.json").write_text(json.dumps({"step": step}))
        if not options.async_save:
            commit(step)
    dist.barrier(group=barriers)


def finish():
    while pending:
        future, at = pending.pop()
        future.result()
        if is_kempnerforge and rank == 0:
            commit(at)


def commit(at):
    temporary = options.folder / "latest.tmp"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(folder_of(at).name)
    temporary.rename(options.folder / "latest")


def newest():
    """The checkpoint from which the program resumes, by its own rule; None for a fresh start."""
    if is_kempnerforge:
        return (
            (options.folder / "latest").resolve() if (options.folder / "latest").exists() else None
        )
    found = [path.parent for path in options.folder.glob("step-*/.metadata")]
    return max(found, key=lambda path: int(path.name.split("-")[1]), default=None)


def load(folder):
    loaded = state()
    dcp.load(loaded, checkpoint_id=folder, process_group=group)
    weights = loaded["model"] if is_kempnerforge else {n: loaded[n] for n in model.state_dict()}
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=loaded["optimizer"])
    if is_kempnerforge:
        return torch.load(folder / "train_state.pt")["step"]
    return int(loaded["train_state"]["step"])


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
# A save in the background needs a group of its own.
group, barriers = dist.new_group(backend="gloo"), dist.new_group(backend="gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(10, 50), torch.nn.ReLU(), torch.nn.Linear(50, 2))
fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
optimizer = torch.optim.AdamW(model.parameters())
pending, step = [], 0
if folder := newest():
    step = load(folder)
say(f"begins at step {step}")
while step < options.steps:
    if step == options.give_up_at:
        break
    model(torch.randn(8, 10)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(options.sleep)
    step += 1
    say(f"step {step}")
    stop = torch.tensor(len(asked))
    dist.all_reduce(stop)
    if stop or step % options.interval == 0 or step == options.steps:
        save()
    if stop:
        break
finish()
dist.destroy_process_group()
