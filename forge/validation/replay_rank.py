"""The replay check on one rank: load a checkpoint and train on from it.

Nothing is written. The config says how far: train.max_steps is the checkpoint's step, or a later
one.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from forge.checkpoint import directory, storage
from forge.core.config import ResolvedConfig
from forge.core.machine import Machine
from forge.core.paths import RunPaths
from forge.data.shards import ShardSet
from forge.launch.launcher import Record, Spec
from forge.launch.process_group import World
from forge.trainer import optim
from forge.trainer.llama import Decoder
from forge.trainer.loop import Trainer
from forge.trainer.nonfinite import Skipped
from forge.trainer.numerics import numerics, prepare


def check(world: World, config: ResolvedConfig, checkpoint: Path, shards: Path) -> Record:
    """Load, or load and train on, as the config says. All ranks call it."""
    found = directory.Checkpoint.open(checkpoint)
    if config.train.max_steps > found.step:
        result = _train_on(world, config, found, ShardSet.open(shards))
    else:
        result = {"weights_digest": _load(world, config, checkpoint, ShardSet.open(shards))}
    world.barrier()
    return Record("completed", world.rank.rank, result=result)


def _load(world: World, config: ResolvedConfig, checkpoint: Path, shards: ShardSet) -> str | None:
    """Weights and optimizer sharded over these ranks, however many wrote them; the weights' digest."""
    model = Decoder(config.model, shards.vocab_size)
    mesh = init_device_mesh("cpu", (world.rank.world_size,))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = optim.make_optimizer(model, config.train)
    storage.load_state(model, optimizer, checkpoint, world)
    return storage.weights_digest(model)


class _Continued(Trainer):
    """The trainer, at a given checkpoint."""

    def __init__(
        self, world: World, config: ResolvedConfig, found: directory.Checkpoint, shards: ShardSet
    ) -> None:
        paths = RunPaths.of(config)
        spec = Spec(
            *("reload", str(paths.root), "", Machine().model_dump(mode="json")),
            nodes=1,
            ranks_per_node=world.rank.world_size,
            launcher={},
        )
        super().__init__(config, paths, world, shards, spec)
        storage.load_state(self.model, self.optimizer, found.folder, world)
        self.decay_steps = found.manifest["decay_steps"]
        self.step = self.first_step = found.step
        self.skipped = Skipped.of(found.manifest)
        self.parallel.wrap()

    def losses(self) -> list[float | None]:
        """Of each step up to the goal, averaged over ranks; None for one that is not finite."""
        found = [self._step() for _ in range(self.step, self.settings.max_steps)]
        return [loss if math.isfinite(loss) else None for loss in found]

    def is_finite(self) -> bool:
        """Whether all ranks have finite weights and moments only."""
        mine = storage.is_finite(storage.training_state(self.model, self.optimizer))
        return all(row[0] for row in self.world.gather([float(mine)], "check of numbers"))


def _train_on(
    world: World, config: ResolvedConfig, found: directory.Checkpoint, shards: ShardSet
) -> dict[str, object]:
    prepare(world.device)
    then = found.manifest["lineage"]["numerics"]
    torch.set_num_threads(then["threads"])  # the sums in a product depend on it
    trainer = _Continued(world, config, found, shards)
    return {
        "losses": trainer.losses(),
        "finite": trainer.is_finite(),
        "numerics": numerics(world.device, then["precision"]),
    }
