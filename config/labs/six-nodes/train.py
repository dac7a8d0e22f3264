"""Plain PyTorch DDP on a small model: an example of a program that Forge runs without knowing it.

Imports nothing of Forge. What it needs is in the environment that every launcher sets (RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR, MASTER_PORT) and in four variables of Forge.
"""

import argparse
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class SimpleModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, 2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


def batches(samples: int, batch_size: int, epoch: int) -> DataLoader:
    torch.manual_seed(0)
    inputs = torch.randn(samples, 10)
    data = TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())
    sampler = DistributedSampler(data, seed=epoch)
    return DataLoader(data, batch_size=batch_size, sampler=sampler)


def save(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Rank 0 writes one file, under a temporary name first."""
    if dist.get_rank() == 0:
        path = Path(os.environ["FORGE_CHECKPOINTS"]) / f"checkpoint-{step}.pt"
        state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, path.with_suffix(".writing"))
        path.with_suffix(".writing").replace(path)
    dist.barrier()
    Path(os.environ["FORGE_SAVED"]).write_text(str(step))  # it can be sealed from here on


def backend_of(wanted: str, *, on_gpu: bool) -> str:
    """`auto`: NCCL where this rank has a GPU. All ranks must have the same: a rank for itself cannot know
    what the others have."""
    if wanted == "nccl" and not on_gpu:
        raise SystemExit(
            "--backend nccl: torch sees no GPU on this node. --backend gloo trains with and without GPUs"
        )
    if wanted == "auto":
        return "nccl" if on_gpu else "gloo"
    return wanted


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds for each step")
    parser.add_argument("--backend", choices=("auto", "nccl", "gloo"), default="auto")
    options = parser.parse_args()

    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    on_gpu = torch.cuda.is_available()
    # A launcher that binds GPUs to tasks (srun --gpus-per-task) shows each rank its own alone.
    index = int(os.environ["LOCAL_RANK"]) % max(1, torch.cuda.device_count())
    device = torch.device("cuda", index) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)  # NCCL's barrier takes the current one
    backend = backend_of(options.backend, on_gpu=on_gpu)
    dist.init_process_group(backend)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    print(f"[RANK {rank}] WORLD_SIZE={world_size} backend={backend} device={device}", flush=True)

    torch.manual_seed(0)
    model = DistributedDataParallel(SimpleModel().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = 0
    if resume := os.environ["FORGE_RESUME"]:
        state = torch.load(resume, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
        print(f"[RANK {rank}] resuming from step {step}", flush=True)

    loader = batches(64 * options.batch_size * world_size, options.batch_size, epoch=0)
    while step < options.steps:
        for number, (inputs, labels) in enumerate(loader):
            if number < step % len(loader):
                continue  # trained on before the checkpoint
            loss = nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            time.sleep(options.sleep)
            Path(os.environ["FORGE_HEARTBEAT"]).write_text(str(step))
            # All ranks must agree on the step at which they stop: a signal reaches them one by one.
            stop = torch.tensor(len(asked), device=device)
            dist.all_reduce(stop)
            if step % 10 == 0 and rank == 0:
                print(f"step {step} loss {loss.item():.4f}", flush=True)
            if stop or step % options.save_every == 0 or step == options.steps:
                save(model, optimizer, step)
            if stop or step == options.steps:
                dist.destroy_process_group()
                return


if __name__ == "__main__":
    main()
