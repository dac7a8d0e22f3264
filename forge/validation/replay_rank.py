"""The replay check on one rank: load a checkpoint and train from it up to train.max_steps, which may
be the checkpoint's own step. Writes no checkpoint."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from forge.checkpoint import directory, storage
from forge.core.config import ResolvedConfig
from forge.data.loader import num_targets
from forge.data.sources import Tokens, open_tokens
from forge.launch.process_group import World
from forge.launch.rank_records import RankRecord, ReplayResult, ReplayTask
from forge.trainer import optim
from forge.trainer.divergence import diverged, ended_by_spike
from forge.trainer.numerics import numerics, prepare
from forge.trainer.start import Start, start_of_checkpoint
from forge.validation.rank_losses import sharded_decoder


def check(world: World, config: ResolvedConfig, task: ReplayTask) -> RankRecord:
    """The record has the digest of the loaded weights, or the result of `_train` if train.max_steps
    is beyond the checkpoint or losses of windows are wanted. All ranks call it."""
    shards, opened = Path(task.shards), directory.Checkpoint.open(Path(task.checkpoint))
    if config.train.max_steps > opened.step or task.next_windows:
        result = _train(world, config, opened, open_tokens(shards), windows=task.next_windows)
        record = RankRecord("completed", world.rank.rank, result=result)
    else:
        digest = _load(world, config, opened, open_tokens(shards))
        record = RankRecord("completed", world.rank.rank, weights_digest=digest)
    world.barrier()
    return record


def _load(
    world: World, config: ResolvedConfig, checkpoint: directory.Checkpoint, tokens: Tokens
) -> str | None:
    """Load weights and optimizer state sharded over these ranks; the weights' digest on rank 0."""
    model = sharded_decoder(config, tokens, world)
    optimizers = optim.make_optimizers(model, config.train)
    with_state = () if checkpoint.manifest.merged else optimizers
    storage.load_state(model, with_state, checkpoint.folder, world)
    return storage.weights_digest(model)


def _train(
    world: World,
    config: ResolvedConfig,
    checkpoint: directory.Checkpoint,
    tokens: Tokens,
    *,
    windows: bool,
) -> ReplayResult:
    """The losses of the steps after a checkpoint, and whether the state after them is finite; with
    `windows` also those of the windows of the next step."""
    prepare(world.device, deterministic=config.train.deterministic)
    then = checkpoint.manifest.lineage.numerics
    start = start_of_checkpoint(config, world, tokens, checkpoint)
    losses, skipped = _losses(config, start)
    state = storage.training_state(start.model, start.optimizers)
    finite = world.gather([float(storage.is_finite(state))], "check of numbers")
    return ReplayResult(
        losses=losses,
        finite=all(row[0] for row in finite),
        numerics=numerics(world.device, then.precision),
        windows=_window_losses(world, config.train.max_steps, start) if windows else [],
        skipped=skipped,
    )


@torch.no_grad()
def _window_losses(world: World, step: int, start: Start) -> list[float | None]:
    """Loss of each window in the batch of a step, counted from 0, over its targets, without dropout."""
    parallel = start.parallel
    parallel.decoder.eval()
    inputs, targets = start.train_step.loader.batch(step)
    rows = [(inputs[row : row + 1], targets[row : row + 1]) for row in range(len(inputs))]
    own = [
        parallel.loss(tokens, wanted) * wanted.numel() / max(1, num_targets(wanted))
        for tokens, wanted in rows
    ]
    table = world.gather_objects(own, list[float], "losses of windows")
    return [loss if math.isfinite(loss) else None for rank in table for loss in rank]


def _losses(config: ResolvedConfig, start: Start) -> tuple[list[float | None], list[int]]:
    """Losses, averaged over ranks, of the steps from a start up to train.max_steps, None where a loss is
    not finite; and the skipped steps. TrainingError where the config does not allow skipping one."""
    losses: list[float | None] = []
    steps, skipped = list[int](), start.skipped()
    for step in range(start.step, config.train.max_steps):
        result = start.train_step(step).read()
        if fatal := skipped.count(result.trouble, config.train, is_spike=result.is_spike):
            ended = ended_by_spike if result.is_spike else diverged
            raise ended(config, fatal, step=step + 1, lr=result.lr, saved_step=0)
        losses.append(result.loss if math.isfinite(result.loss) else None)
        steps += [step + 1] if result.trouble else []
    return losses, steps
