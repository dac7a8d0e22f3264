"""The training loop of one rank: resume, steps, evaluation, checkpoints, stops."""

from __future__ import annotations

import functools
import gc
import math
import time
from collections import deque
from pathlib import Path

from forge.checkpoint import compatibility, parent, resume, rewinds, storage
from forge.checkpoint.async_saver import Saver
from forge.checkpoint.manifest import (
    Artifact,
    Lineage,
    Manifest,
    ParentCheckpoint,
    ReferenceLosses,
    SkippedSteps,
)
from forge.cluster.lock import check_held
from forge.core import events, failpoints
from forge.core.config import ResolvedConfig
from forge.core.errors import Exit, TrainingError
from forge.core.files import digest_file
from forge.core.paths import RunPaths, tokenizer_folder
from forge.core.process import hostname
from forge.core.provenance import versions
from forge.core.terminal import say
from forge.data.loader import windows_by_source
from forge.data.shards import MANIFEST
from forge.data.sources import Tokens, digests_by_source, open_tokens
from forge.launch.heartbeat import heartbeat
from forge.launch.process_group import World, dump_collectives, is_peer_loss
from forge.launch.rank_output import RankProgress
from forge.launch.rank_records import LaunchSpec, RankRecord, TrainTask
from forge.launch.shutdown_budget import ShutdownBudget
from forge.launch.stop_signal import StopFlag
from forge.launch.watchdog import Watchdog
from forge.trainer import metrics, optim, pretrained
from forge.trainer.divergence import SkippedCounts, SpikeRule, diverged, ended_by_spike
from forge.trainer.initialize import initialize
from forge.trainer.llama import Decoder
from forge.trainer.numerics import (
    device_name,
    numerics,
    precision,
    prepare,
)
from forge.trainer.parallel import ParallelModel
from forge.trainer.source_mix import SourceMix, losses_text, mean_loss
from forge.trainer.step import Agreement, Flags, LaunchedStep, StepResult, TrainStep, train_loader
from forge.trainer.validation_loss import reference_losses, validation_losses

# Steps between two garbage collections. When Python chooses the moment, it differs from rank to rank, and
# each time all ranks wait for one (torchtitan collects every 50 steps, too).
COLLECT_EVERY = 50
# After the loss of a rank, how long to wait for a save in progress that does not need that rank.
PEERS_SAVE_SEC = 5.0


class Trainer:
    """Trains a run on one rank, from resume to the last commit. All ranks call every method."""

    def __init__(
        self,
        config: ResolvedConfig,
        paths: RunPaths,
        world: World,
        tokens: Tokens,
        spec: LaunchSpec,
    ) -> None:
        self.config, self.paths, self.world = config, paths, world
        self.spec, self.launch = spec, spec.launch
        self.settings, self.tokens = config.train, tokens
        self.precision = precision(self.settings.precision, world.device)
        self.val_windows = windows_by_source(tokens, "val", self.settings.seq_len)
        self.model = Decoder(config.model, tokens.vocab_size)
        self.parallel = ParallelModel(
            self.model, self.settings, world, self.precision, eos_id=tokens.eos_id
        )
        self.optimizers = optim.make_optimizers(self.model, self.settings)
        self.num_parameters = self.model.num_parameters()

        self.step = 0  # completed steps, those whose results are not read yet included
        self.first_step = 0  # completed steps when this launch began
        self.saved_step = 0  # of the newest checkpoint, whose save may be in progress
        self.saved_at = time.monotonic()
        self.lr = self.settings.lr  # of the last step whose result is read
        self.skipped = SkippedCounts()
        # A GPU always has the next step to compute while the host reads the results of the step before.
        self.most_launched = 1 if world.runs_ahead else 0
        self.launched: deque[LaunchedStep] = deque()
        self.read_at = 0.0  # when the newest result was read, or the first of `launched` begun

        self.saver = Saver(
            world,
            paths,
            async_save=spec.machine.async_save,
            # A node that lost its network must not commit: the job may run on other nodes by now.
            before_commit=lambda: check_held(paths.root, spec.launcher),
        )
        self.throughput = metrics.Throughput(
            tokens_per_step=self.settings.batch_size * self.settings.seq_len,
            flops_per_token=self.model.flops_per_token(self.settings.seq_len),
            world_size=world.rank.world_size,
            peak_flops=metrics.peak_flops(device_name(world.device)),
        )
        self.budget = ShutdownBudget.of(spec, self.num_parameters, steps_ahead=self.most_launched)

    # --- start ---------------------------------------------------------------------------------

    def resume(self) -> None:
        """Load the newest valid checkpoint, else the parent's, else the pretrained weights, else draw the
        initial ones. DataError if the checkpoint was trained on other data."""
        require = self.spec.train_task.require_checkpoint
        own = resume.newest_verified(
            self.paths, self.world, require_checkpoint=require, parent_name=self.config.starts_from
        )
        checkpoint = own or resume.verified_parent(self.config, self.world)
        self.decay_steps = compatibility.frozen_decay_steps(self.config, own)
        made_from = parent.recorded(self.config, own, checkpoint)
        self.lineage = self._lineage(made_from, pretrained.recorded(self.config, checkpoint))
        decisions = self.spec.train_task.rewinds
        self.left_out = rewinds.left_out(checkpoint.manifest if checkpoint else None, decisions)
        self.mix = SourceMix.of_start(self.tokens, self.config, own, checkpoint, self.left_out)
        order = self.mix.order if self.mix else None
        loader = train_loader(self.tokens, self.settings, self.world, order, self.left_out)
        if checkpoint is None and self.config.ids.model:
            pretrained.load(self.model, self.config, self.world)
        elif checkpoint is None:
            heartbeat.beat("draw of the initial weights")
            initialize(self.model, self.settings.seed)
        else:
            same_data = functools.partial(resume.check_same_data, checkpoint, self.lineage)
            self.world.on_main(same_data, "check of the lineage")
            storage.load_state(self.model, self.optimizers, checkpoint.folder, self.world)
            failpoints.reach("load.done", checkpoint.folder)
            self.step = self.saved_step = self.first_step = checkpoint.step
            self.skipped = SkippedCounts.of(checkpoint.manifest)
            if self.world.rank.is_main:
                say(f"{'resume' if own else 'start'} from {checkpoint.folder}")
        self.parallel.wrap()
        manifest = checkpoint.manifest if checkpoint else None
        self.spikes = SpikeRule.of(self.settings, self.world.device, manifest)
        self.train_step = TrainStep(
            self.parallel, self.optimizers, loader, self.decay_steps, self.spikes
        )
        self.saver.hold_updates(self.optimizers)

    def _lineage(self, made_from: ParentCheckpoint | None, weights: Artifact | None) -> Lineage:
        """The lineage of this launch's checkpoints. Taken once: the code in memory does not change."""
        # The nodes may see their staged shards only, which name the tokenizer's digest, too.
        folder = tokenizer_folder(self.config.data, self.config.ids.tokenizer)
        file, made_with = folder / "tokenizer.json", self.tokens.tokenizer_digest
        return Lineage.of(
            self.config,
            tokenizer_digest=digest_file(file) if file.exists() else made_with,
            tokens_digest=self.tokens.digest,
            numerics=numerics(self.world.device, self.precision),
            parent=made_from,
            source_digests=digests_by_source(self.tokens),
            model=weights,
        )

    # --- the loop ------------------------------------------------------------------------------

    def run(self, stop: StopFlag) -> RankRecord:
        """Train to train.max_steps or to a stop; commits the last state, unless that is step 0.

        At step 0 nothing is lost without a commit. Reading AdamW's state before its first step advances
        its counter, so that the resumed run would end with other weights.
        """
        settings = self.settings
        self.progress = RankProgress(
            self.spec.directory, f"train {self.config.run}", settings.max_steps, "steps"
        )
        gc.disable()
        agreed = self._agree(stop)
        if self.step == 0 and not agreed.stop_cause:
            self.evaluate()
            agreed = self._agree(stop)
        while self.step < settings.max_steps and not agreed.stop_cause:
            agreed = self._train_one_step(stop)
            if agreed.save_done:
                self._finish_save()
            # A stop has little time: no evaluation, and it is saved after the loop.
            if self._is_due(settings.eval_every) and not agreed.stop_cause:
                self.evaluate()
            if self._checkpoint_is_due(agreed) and not agreed.stop_cause:
                self.save()
            if self.step % COLLECT_EVERY == 0:
                gc.collect(1)
        if self.step > 0:
            self.save(last=True)
        return self._end(agreed.stop_cause)

    def _is_due(self, every: int, step: int | None = None) -> bool:
        """Whether an action that is done every `every` steps, and after the last step, is due after
        `step` steps; by default now."""
        step = self.step if step is None else step
        return step % every == 0 or step == self.settings.max_steps

    def _checkpoint_is_due(self, agreed: Agreement) -> bool:
        """Whether to save now, by steps or time. Not after the last step, which is saved after the
        loop."""
        by_steps = self.step % self.settings.checkpoint_every == 0
        return self.step < self.settings.max_steps and (by_steps or agreed.checkpoint_overdue)

    def _train_one_step(self, stop: StopFlag) -> Agreement:
        """Launch a step, and read the results of those that were launched early enough. What the ranks
        agreed in the newest of these, if in any. Raises as `_take`."""
        if not self.launched:
            self.read_at = time.perf_counter()
        flags = functools.partial(self._flags, stop)
        self.launched.append(self.train_step(self.step, flags))
        self.step += 1
        pauses = self._is_due(self.settings.eval_every) or self._checkpoint_is_due(Agreement())
        return self._read_results(0 if pauses else self.most_launched)

    def _read_results(self, left: int = 0) -> Agreement:
        """Read the results of all steps launched but the last `left`. Before anything that is to be done
        after a step: it may be that this step must not be followed by anything. Raises as `_take`."""
        agreed = Agreement()
        while len(self.launched) > left:
            agreed = self._take(self.launched.popleft().read())
        return agreed

    def _take(self, result: StepResult) -> Agreement:
        """Count and log a step. TrainingError if its loss or gradient norm is not finite or a spike,
        unless train.on_nonfinite or train.spike lets the update be skipped. Raises Rewind as `_rewind`.
        """
        self.lr, done = result.lr, result.step + 1
        now = time.perf_counter()
        seconds, self.read_at = now - self.read_at, now
        self.throughput.add_step(seconds)
        if done > self.first_step + 1:  # the first step of a launch is slower
            self.budget.measure_step(seconds)
        if fatal := self.skipped.count(result.trouble, self.settings, is_spike=result.is_spike):
            if result.is_spike and self.settings.spike == "rewind":
                fatal = self._rewind(result)
            raise self._diverged(fatal, step=done, is_spike=result.is_spike)
        if result.trouble and self.world.rank.is_main:
            in_a_row = self.skipped.in_a_row
            self._record(events.Skipped(step=done, in_a_row=in_a_row, reason=result.trouble))
            say(f"warning: the update of step {done} is skipped: {result.trouble}")
        if self._is_due(self.settings.log_every, done):
            self._log(result, done)
        return Agreement.of(result.flags)

    def _rewind(self, spike: StepResult) -> str:
        """Decide to start again from the newest checkpoint, without the batches up to the spike: raises
        Rewind. Why training must end instead, if that may not be."""
        while self.launched:  # other ranks wait in its collectives
            self.launched.popleft().read()
        self._finish_save()
        stages = [stage.step for stage in self.mix.at_start.stages] if self.mix else []
        if refusal := rewinds.refusal(self.left_out, self.saved_step, spike.step, stages):
            return f"{spike.trouble}; {refusal}"
        if self.world.rank.is_main:
            event = rewinds.decide(
                self.left_out,
                self.saved_step,
                spike.step,
                reason=spike.trouble,
                config=self.config,
            )
            self._record(event)
            say(
                f"warning: step {event.spike}: {event.reason}; back to step {event.to_step}, without the"
                f" {event.batches} batches from there to the spike"
            )
        raise rewinds.RewindDecided

    def _flags(self, stop: StopFlag) -> list[float]:
        """The flags that this rank sends to the others."""
        cause, overdue = stop.cause(), False
        if self.world.rank.is_main:
            minutes = self.settings.checkpoint_minutes
            overdue = minutes is not None and time.monotonic() - self.saved_at > 60 * minutes
            cause = cause or ("deadline" if self.budget.is_due() else "")
        return Flags(cause, overdue, self.saver.is_done()).numbers

    def _agree(self, stop: StopFlag) -> Agreement:
        """Decide together with all ranks where no step carries the flags."""
        what = f"agreement after step {self.step}"
        return Agreement.of(self.world.gather(self._flags(stop), what))

    def _end(self, stop_cause: str) -> RankRecord:
        """The record of this rank: completed, or stopped before train.max_steps."""
        rank = self.world.rank
        if self.step < self.settings.max_steps:
            return RankRecord("stopped", rank.rank, Exit.STOPPED, self.step, stop_cause)
        digest = storage.weights_digest(self.model)
        if digest is not None:  # rank 0
            self._record(events.Completed(step=self.step, weights_digest=digest))
        self.world.barrier()
        return RankRecord("completed", rank.rank, step=self.step, weights_digest=digest)

    def _check_finite(self, losses: list[float]) -> None:
        """TrainingError if the last update broke the weights: no run could resume from such a
        checkpoint. The saver checks every number of the state when it writes."""
        if not all(map(math.isfinite, losses)):
            raise self._diverged(
                f"the reference losses {losses} are not finite; no checkpoint was committed"
            )

    def _diverged(
        self, what: str, step: int | None = None, *, is_spike: bool = False
    ) -> TrainingError:
        """The error for training that diverged. step: where it did; by default the last step."""
        step = self.step if step is None else step
        error = ended_by_spike if is_spike else diverged
        return error(self.config, what, step=step, lr=self.lr, saved_step=self.saved_step)

    # --- metrics and evaluation ----------------------------------------------------------------

    def _log(self, result: StepResult, step: int) -> None:
        """Write a metrics line and update the progress bar. step: as counted from 1."""
        tokens_per_sec, mfu = self.throughput.measure()
        if not self.world.rank.is_main:
            return
        line = metrics.TrainLine(
            launch=self.launch,
            step=step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            tokens_per_sec=round(tokens_per_sec, 1),
            mfu=mfu,
            tokens=step * self.throughput.tokens_per_step,
        )
        metrics.write(self.paths.metrics, line)
        self.progress(step, f"loss {result.loss:.3f}, {tokens_per_sec:,.0f} tokens/s")

    def evaluate(self) -> None:
        """Write the validation loss to metrics and event log. TrainingError if it is not finite."""
        started = time.perf_counter()
        losses = validation_losses(self.parallel, self.val_windows)
        if not all(map(math.isfinite, losses.values())):
            raise self._diverged(f"validation loss {losses_text(losses)} is not finite")
        if self.world.rank.is_main:
            loss = mean_loss(losses, self.mix.at_start if self.mix else None, self.step)
            sources = losses if self.mix else None
            line = metrics.EvalLine(launch=self.launch, step=self.step, loss=loss, sources=sources)
            metrics.write(self.paths.metrics, line)
            seconds = round(time.perf_counter() - started, 3)
            self.budget.measure_evaluation(seconds)
            self._record(events.Eval(step=self.step, seconds=seconds, loss=loss, sources=sources))
            by_source = f" ({losses_text(losses)})" if sources else ""
            say(f"step {self.step}: validation loss {loss:.4f}{by_source}")

    # --- checkpoints ---------------------------------------------------------------------------

    def save(self, *, last: bool = False) -> None:
        """Begin to save a checkpoint of this step, unless it is saved already.

        last: no step follows, so wait for the commit.
        """
        self._read_results()
        self._finish_save()
        if self.saved_step == self.step:
            return
        started = time.perf_counter()
        reference = reference_losses(self.parallel, self.val_windows)
        self._check_finite(reference.losses)
        state = storage.training_state(self.model, self.optimizers)
        settings = self.settings
        begun = self.saver.start(
            state,
            self._manifest(reference),
            keep_last=settings.keep_last,
            keep_every=settings.keep_every,
            last=last,
        )
        begun.stall = time.perf_counter() - started  # includes the reference losses
        self.saved_step, self.saved_at = self.step, time.monotonic()
        if last:
            self._finish_save()

    def _finish_save(self) -> None:
        """Wait for the save in progress, if there is one, and record it. Raises as Saver.finish does."""
        done = self.saver.finish()
        if done is None or not self.world.rank.is_main:
            return
        assert done.seconds is not None and done.checkpoint is not None
        seconds, stall = round(done.seconds, 3), round(done.stall, 3)
        self._record(events.Save(step=done.step, seconds=seconds, stall=stall, bytes=done.size))
        say(f"step {done.step}: committed {done.checkpoint.folder}")
        self.budget.measure_save(done.seconds, done.stall)
        if warning := self.budget.warning():
            self._record(events.Budget(needed=round(self.budget.needed, 1)))
            say(f"warning: {warning}")

    def _manifest(self, reference: ReferenceLosses) -> Manifest:
        return Manifest(
            step=self.step,
            world_size=self.world.rank.world_size,
            decay_steps=self.decay_steps,
            next_sample=self.left_out.batch(self.step) * self.settings.batch_size,
            skipped=SkippedSteps(steps=self.skipped.steps, in_a_row=self.skipped.in_a_row),
            reference=reference,
            lineage=self.lineage,
            files={},
            mix=self.mix.record(self.step) if self.mix else None,
            spike_window=self.spikes.recorded() if self.spikes else [],
            left_out=rewinds.to_record(self.left_out),
        )

    def announce(self, seconds: float) -> None:
        """Record and print the step, the model and the hardware that this launch begins with."""
        if not self.world.rank.is_main:
            return
        self._record(
            events.Init(
                launch=self.launch,
                seconds=round(seconds, 3),
                step=self.step,
                world_size=self.world.rank.world_size,
                parameters=self.num_parameters,
                versions=versions(fp8=self.settings.fp8 is not None),
                numerics=numerics(self.world.device, self.precision),
            )
        )
        fp8 = f" with products in float8 ({self.settings.fp8})" if self.settings.fp8 else ""
        say(
            f"train {self.config.run}: {self.num_parameters:,} parameters, {self.precision}{fp8}"
            f" on {self.world.rank.world_size} x {self.world.device.type}, step {self.step} of"
            f" {self.settings.max_steps}"
        )

    def _record(self, event: events.Event) -> None:
        """Append to the run's event log. Rank 0."""
        events.record(self.paths.events, event)


# --- one rank, from its start to its end ---------------------------------------------------------


def train(
    config: ResolvedConfig,
    paths: RunPaths,
    world: World,
    stop: StopFlag,
    spec: LaunchSpec,
) -> RankRecord:
    """Train one run on this rank to train.max_steps or to a stop. All ranks call it."""
    Watchdog(spec, world.rank.rank, lambda: dump_collectives(world)).start()
    prepare(world.device, deterministic=config.train.deterministic)
    tokens = world.patiently(
        lambda: _open_verified(_shards_folder(spec.train_task), world), "check of shards"
    )
    trainer = Trainer(config, paths, world, tokens, spec)
    trainer.resume()
    trainer.announce(time.time() - spec.train_task.started)
    try:
        return trainer.run(stop)
    except rewinds.RewindDecided:
        rank = world.rank.rank
        return RankRecord("stopped", rank, Exit.STOPPED, trainer.saved_step, rewinds.CAUSE)
    except Exception as err:
        # A save in progress may still be committed, unless it waits for a lost rank.
        grace_sec = spec.machine.stop_grace_sec
        trainer.saver.drain(PEERS_SAVE_SEC if is_peer_loss(err) else grace_sec)
        raise


def _shards_folder(task: TrainTask) -> Path:
    """The directory of shards that this node's ranks read: the staged copy, else the shared one."""
    staged = Path(task.staged.get(hostname(), task.shared))
    if (staged / MANIFEST).exists():
        return staged
    say(f"warning: {staged} has disappeared, reading the shards from {task.shared}")
    return Path(task.shared)


def _open_verified(folder: Path, world: World) -> Tokens:
    """Open the shards and verify their digests; each rank of a node reads a share of the files."""
    tokens = open_tokens(folder)
    tokens.verify((world.rank.local_rank, world.rank.local_world_size))
    return tokens
