"""The replay check on one rank: load a checkpoint and train from it up to train.max_steps, which may
be the checkpoint's own step. Writes no checkpoint."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from forge.checkpoint import directory, rewinds, storage
from forge.core.config import ResolvedConfig
from forge.data.sources import Tokens, open_tokens
from forge.launch.process_group import World
from forge.launch.rank_records import RankRecord
from forge.trainer import optim
from forge.trainer.divergence import SkippedCounts, SpikeRule, diverged, ended_by_spike
from forge.trainer.llama import Decoder
from forge.trainer.numerics import numerics, precision, prepare
from forge.trainer.parallel import ParallelModel
from forge.trainer.source_mix import SourceMix
from forge.trainer.step import TrainStep, train_loader
from forge.validation.rank_losses import sharded_decoder


def check(world: World, config: ResolvedConfig, checkpoint: Path, shards: Path) -> RankRecord:
    """The record has the digest of the loaded weights, or the result of `_train` if train.max_steps
    is beyond the checkpoint. All ranks call it."""
    opened = directory.Checkpoint.open(checkpoint)
    if config.train.max_steps > opened.step:
        result = _train(world, config, opened, open_tokens(shards))
        record = RankRecord("completed", world.rank.rank, result=result)
    else:
        digest = _load(world, config, checkpoint, open_tokens(shards))
        record = RankRecord("completed", world.rank.rank, weights_digest=digest)
    world.barrier()
    return record


def _load(world: World, config: ResolvedConfig, checkpoint: Path, tokens: Tokens) -> str | None:
    """Load weights and optimizer state sharded over these ranks; the weights' digest on rank 0."""
    model = sharded_decoder(config, tokens, world)
    optimizers = optim.make_optimizers(model, config.train)
    storage.load_state(model, optimizers, checkpoint, world)
    return storage.weights_digest(model)


def _train(
    world: World, config: ResolvedConfig, checkpoint: directory.Checkpoint, tokens: Tokens
) -> dict[str, object]:
    """The losses of the steps after a checkpoint, and whether the state after them is finite."""
    prepare(world.device, deterministic=config.train.deterministic)
    then = checkpoint.manifest.lineage.numerics
    torch.set_num_threads(then.threads)  # the order of sums in a product depends on it
    train_step = _step_after(world, config, checkpoint, tokens)
    losses = _losses(config, train_step, checkpoint)
    state = storage.training_state(train_step.parallel.decoder, train_step.optimizers)
    finite = world.gather([float(storage.is_finite(state))], "check of numbers")
    return {
        "losses": losses,
        "finite": all(row[0] for row in finite),
        "numerics": numerics(world.device, then.precision),
    }


def _step_after(
    world: World, config: ResolvedConfig, checkpoint: directory.Checkpoint, tokens: Tokens
) -> TrainStep:
    """The training step with the state of a checkpoint."""
    settings = config.train
    model = Decoder(config.model, tokens.vocab_size)
    parallel = ParallelModel(
        model,
        settings,
        world,
        precision(settings.precision, world.device),
        eos_id=tokens.eos_id,
    )
    optimizers = optim.make_optimizers(model, settings)
    storage.load_state(model, optimizers, checkpoint.folder, world)
    parallel.wrap()
    mix = SourceMix.recorded(tokens, settings, checkpoint)
    return TrainStep(
        parallel,
        optimizers,
        train_loader(
            tokens,
            settings,
            world,
            mix.order if mix else None,
            rewinds.left_out(checkpoint.manifest),
        ),
        checkpoint.manifest.decay_steps,
        SpikeRule.of(settings, world.device, checkpoint.manifest),
    )


def _losses(
    config: ResolvedConfig, train_step: TrainStep, checkpoint: directory.Checkpoint
) -> list[float | None]:
    """Losses, averaged over ranks, of the steps after a checkpoint up to train.max_steps; None where a
    loss is not finite. TrainingError where the config does not allow skipping the update."""
    losses, skipped = [], SkippedCounts.of(checkpoint.manifest)
    for step in range(checkpoint.step, config.train.max_steps):
        result = train_step(step).read()
        if fatal := skipped.count(result.trouble, config.train, is_spike=result.is_spike):
            ended = ended_by_spike if result.is_spike else diverged
            raise ended(config, fatal, step=step + 1, lr=result.lr, saved_step=0)
        losses.append(result.loss if math.isfinite(result.loss) else None)
    return losses
