"""The start of training on one rank: model, optimizers, sample order and lineage.

Training starts here, and so does the replay check, which must compute what training computed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from forge.checkpoint import compatibility, parent, resume, storage
from forge.checkpoint.directory import Checkpoint
from forge.checkpoint.manifest import (
    Artifact,
    Hardware,
    Lineage,
    Manifest,
    ReferenceLosses,
    SkippedSteps,
)
from forge.core import failpoints
from forge.core.config import ResolvedConfig
from forge.core.files import digest_file
from forge.core.paths import TOKENIZER, RunPaths, tokenizer_folder
from forge.core.provenance import cpu_name
from forge.core.terminal import say
from forge.data.sources import Tokens, digests_by_source
from forge.hosts.network import cores_of_rank
from forge.launch.process_group import World
from forge.launch.rank_records import LaunchSpec
from forge.trainer import optim, pretrained
from forge.trainer.divergence import SkippedCounts, SpikeRule
from forge.trainer.initialize import initialize
from forge.trainer.models.decoder import Decoder, make_decoder
from forge.trainer.numerics import numerics, precision
from forge.trainer.parallel import ParallelModel
from forge.trainer.source_mix import SourceMix
from forge.trainer.step import TrainStep, train_loader


@dataclass(frozen=True)
class Start:
    """Start of training on one rank, the state of `checkpoint` loaded.

    train_step: with the model, the optimizers, the loader and the spike rule. mix: None for a run without
    sources. lineage: of the checkpoints that will be saved. checkpoint: None for new weights.
    """

    train_step: TrainStep
    mix: SourceMix | None
    lineage: Lineage
    checkpoint: Checkpoint | None

    @property
    def step(self) -> int:
        """Number of completed steps."""
        return self.checkpoint.step if self.checkpoint else 0

    @property
    def parallel(self) -> ParallelModel:
        return self.train_step.parallel

    @property
    def model(self) -> Decoder:
        return self.parallel.decoder

    @property
    def optimizers(self) -> optim.Optimizers:
        return self.train_step.optimizers

    def skipped(self) -> SkippedCounts:
        """New counters of steps without an update, which continue those of the checkpoint."""
        return SkippedCounts.of(self.checkpoint.manifest) if self.checkpoint else SkippedCounts()

    def manifest(self, step: int, skipped: SkippedCounts, reference: ReferenceLosses) -> Manifest:
        """The manifest of a checkpoint after `step` completed steps, without files. Waits for the device
        with train.spike."""
        settings, spikes = self.parallel.settings, self.train_step.spikes
        return Manifest(
            step=step,
            world_size=self.parallel.world.rank.world_size,
            decay_steps=self.train_step.decay_steps,
            why_not_compiled=self.parallel.why_not_compiled,
            next_sample=step * settings.batch_size,
            skipped=SkippedSteps(steps=skipped.steps, in_a_row=skipped.in_a_row),
            reference=reference,
            lineage=self.lineage,
            files={},
            mix=self.mix.record(step) if self.mix else None,
            spike_window=spikes.recorded() if spikes else [],
        )


def start_of_run(
    config: ResolvedConfig, paths: RunPaths, world: World, tokens: Tokens, spec: LaunchSpec
) -> Start:
    """The start of a run: from its newest valid checkpoint, else from its parent's, else with pretrained
    weights, else with new ones. All ranks call it.

    Raises DataError if the checkpoint was trained on other data, ConfigError if the ranks cannot share
    the model or the batch, or a share of train.mix is too small.
    """
    task = spec.train_task
    own = resume.newest_verified(
        paths,
        world,
        require_checkpoint=task.require_checkpoint,
        parent_name=config.starts_from,
    )
    checkpoint = own or resume.verified_parent(config, world)
    lineage = _lineage(config, world, tokens, own, checkpoint)
    lineage = lineage.model_copy(
        update={"environment": task.environment, "hardware": _hardware(lineage, world)}
    )
    if checkpoint:
        digests = lineage.data_digests
        same_data = functools.partial(compatibility.check_same_data, checkpoint, digests)
        world.on_main(same_data, "check of the lineage")
    start = _assembled(
        config,
        world,
        tokens,
        checkpoint,
        mix=SourceMix.of_start(tokens, config, own, checkpoint),
        lineage=lineage,
        decay_steps=compatibility.frozen_decay_steps(config, own),
        why_not_compiled=compatibility.why_not_compiled(config, own),
    )
    if checkpoint:
        failpoints.reach("load.done", checkpoint.folder)
        if world.rank.is_main:
            say(f"{'resume' if own else 'start'} from {checkpoint.folder}")
            if merged := checkpoint.manifest.merged:
                say(
                    f"{merged}: step, next sample and mix of the newest, new moments of the optimizer"
                )
    _tell_threads(world, own, spec)
    return start


def _hardware(lineage: Lineage, world: World) -> Hardware:
    """The hardware of the lineage; where ranks add in different orders, with the processors of all, so
    that no host passes for one that computes as all of them did. All ranks call it."""
    if world.device.type != "cpu":
        return lineage.hardware
    own = f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    kinds = sorted({*world.gather_objects(own, str, "comparison of processors")})
    if len(kinds) == 1:
        return lineage.hardware
    return lineage.hardware.model_copy(update={"cpu": "; ".join(kinds)})


def _tell_threads(world: World, own: Checkpoint | None, spec: LaunchSpec) -> None:
    """Print what the number of threads means for the last bits of a resumed run, where its cores or
    OMP_NUM_THREADS are not those of its checkpoint. All ranks call it."""
    then = own.manifest.lineage.numerics.cpu_threads if own else None
    if world.device.type != "cpu":
        return
    table = world.gather([float(torch.get_num_threads())], "comparison of threads")
    now = sorted({int(row[0]) for row in table})
    cores = cores_of_rank(spec.ranks_per_node, spec.cpus_per_rank)
    if world.rank.is_main and (text := threads_text(now, then, cores, spec.threads)):
        say(text)


def threads_text(now: list[int], then: int | None, cores: int, exported: str | None) -> str:
    """The sentence on threads at a start; "" where there is nothing to say. now: the numbers that the
    ranks have, in order. then: that of the checkpoint, None without one. cores: of a rank. exported:
    OMP_NUM_THREADS of the user."""
    numbers = " to ".join(str(number) for number in (now if len(now) == 1 else (now[0], now[-1])))
    if len(now) == 1 and then in (None, now[0]):
        if then is None or then == cores or exported:
            return ""
        return (
            f"threads a rank: {then} of {cores} cores, as in the checkpoint, for equal bits; to use all,"
            f" export OMP_NUM_THREADS={cores}"
        )
    reason = f"OMP_NUM_THREADS is {exported}" if exported else "nodes have other numbers of cores"
    made = f", the checkpoint was made with {then}" if then else ""
    return (
        f"warning: threads a rank: {numbers}{made}: {reason}. With another number sums are added in"
        " another order: the last bits of weights may differ between a resumed and an uninterrupted run"
    )


def start_of_checkpoint(
    config: ResolvedConfig, world: World, tokens: Tokens, checkpoint: Checkpoint
) -> Start:
    """The start with which a run has continued from a checkpoint of its own. All ranks call it."""
    manifest = checkpoint.manifest
    return _assembled(
        config,
        world,
        tokens,
        checkpoint,
        mix=SourceMix.recorded(tokens, config.train, checkpoint),
        lineage=manifest.lineage,
        decay_steps=manifest.decay_steps,
        why_not_compiled=compatibility.why_not_compiled(config, checkpoint),
    )


def _assembled(
    config: ResolvedConfig,
    world: World,
    tokens: Tokens,
    checkpoint: Checkpoint | None,
    *,
    mix: SourceMix | None,
    lineage: Lineage,
    decay_steps: int,
    why_not_compiled: str | None,
) -> Start:
    settings, device = config.train, world.device
    model = make_decoder(config.model, tokens.vocab_size)
    parallel = ParallelModel(
        model,
        settings,
        world,
        precision(settings.precision, device),
        eos_id=tokens.eos_id,
        masked=tokens.masked,
    )
    optimizers = optim.make_optimizers(model, settings)
    loader = train_loader(tokens, settings, world, mix.order if mix else None)
    if checkpoint:
        with_state = () if checkpoint.manifest.merged else optimizers
        storage.load_state(model, with_state, checkpoint.folder, world)
    elif config.ids.model:
        pretrained.load(model, config, world)
    else:
        initialize(model, settings.seed)
    parallel.wrap(why_not_compiled)
    spikes = SpikeRule.of(settings, device, checkpoint.manifest if checkpoint else None)
    train_step = TrainStep(parallel, optimizers, loader, decay_steps, spikes)
    return Start(train_step, mix, lineage, checkpoint)


def _lineage(
    config: ResolvedConfig,
    world: World,
    tokens: Tokens,
    own: Checkpoint | None,
    checkpoint: Checkpoint | None,
) -> Lineage:
    """The lineage of this launch's checkpoints. Taken once: the code in memory does not change."""
    # The nodes may see their staged shards only, which name the tokenizer's digest, too.
    file = tokenizer_folder(config.data, config.ids.tokenizer) / TOKENIZER
    weights: Artifact | None = pretrained.recorded(config, checkpoint)
    return Lineage.of(
        config,
        tokenizer_digest=digest_file(file) if file.exists() else tokens.tokenizer_digest,
        tokens_digest=tokens.digest,
        numerics=numerics(world.device, precision(config.train.precision, world.device)),
        parent=parent.recorded(config, own, checkpoint),
        source_digests=digests_by_source(tokens),
        model=weights,
    )
