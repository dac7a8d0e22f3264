"""Load a checkpoint on another number of ranks than wrote it: one rank's part of validation."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from forge import checkpoints, optim
from forge.config import Config
from forge.launcher import Record
from forge.model import Decoder
from forge.shards import ShardSet
from forge.world import World


def check(world: World, config: Config, checkpoint: Path, shards: Path) -> Record:
    """Load weights and optimizer sharded over these ranks; their digest. All ranks call it."""
    model = Decoder(config.model, ShardSet.open(shards).vocab_size)
    mesh = init_device_mesh("cpu", (world.rank.world_size,))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = optim.make_optimizer(model, config.train)
    checkpoints.load_state(model, optimizer, checkpoint, world)
    digest = checkpoints.weights_digest(model)
    finite = all(bool(torch.isfinite(p.to_local()).all()) for p in model.parameters())  # type: ignore[attr-defined]
    world.barrier()
    result = {"weights_digest": digest, "finite": finite}
    return Record("completed", world.rank.rank, result=result)
