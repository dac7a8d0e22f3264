"""The training loop of one rank: resume, steps, evaluation, checkpoints, stops."""

from __future__ import annotations

import functools
import gc
import math
import time
from collections import deque
from collections.abc import Mapping

from forge.checkpoint import storage
from forge.checkpoint.async_saver import Saver
from forge.core import events
from forge.core.config import ResolvedConfig
from forge.core.errors import Exit, TrainingError
from forge.core.paths import RunPaths
from forge.core.provenance import versions
from forge.core.terminal import say
from forge.data.windows import Windows, windows_by_source
from forge.hosts.lock import check_held
from forge.launch.lost_ranks import note_gpu_error, of_gpu_error
from forge.launch.process_group import World, collectives, dump_collectives, is_peer_loss
from forge.launch.rank_output import RankProgress
from forge.launch.rank_records import LaunchSpec, RankRecord
from forge.launch.shutdown_budget import ShutdownBudget
from forge.launch.stop_signal import StopFlag
from forge.launch.watchdog import Watchdog
from forge.trainer import metrics
from forge.trainer.divergence import diverged, ended_by_spike
from forge.trainer.numerics import device_name, numerics, prepare
from forge.trainer.save_clock import SaveClock, told
from forge.trainer.shard_check import verified_tokens
from forge.trainer.start import Start, start_of_run
from forge.trainer.step import Agreement, Flags, LaunchedStep, StepResult
from forge.trainer.validation_loss import measured, reference_losses

# Steps between two garbage collections. When Python chooses the moment, it differs from rank to rank, and
# each time all ranks wait for one (torchtitan collects every 50 steps, too).
COLLECT_EVERY = 50
# After the loss of a rank, how long to wait for a save in progress that does not need that rank.
PEERS_SAVE_SEC = 5.0


class Trainer:
    """Trains a run on one rank, from its start to the last commit. All ranks call every method."""

    def __init__(
        self,
        config: ResolvedConfig,
        paths: RunPaths,
        world: World,
        spec: LaunchSpec,
        *,
        start: Start,
        val_windows: Mapping[str, Windows],
    ) -> None:
        """val_windows: of the validation splits, by source."""
        self.config, self.paths, self.world = config, paths, world
        self.launch, self.settings = spec.launch, config.train
        self.text_bytes = spec.train_task.text_bytes
        self.start, self.val_windows = start, val_windows
        self.mix, self.parallel, self.model = start.mix, start.parallel, start.model
        self.num_parameters = self.model.num_parameters()

        self.step = start.step  # completed steps, those whose results are not read yet included
        self.saved_step = start.step  # of the newest checkpoint, whose save may be in progress
        self.lr = self.settings.lr  # of the last step whose result is read
        self.skipped = start.skipped()
        # A GPU always has the next step to compute while the host reads the results of the step before.
        self.most_launched = 1 if world.runs_ahead else 0
        self.launched: deque[LaunchedStep] = deque()
        self.read_at = 0.0  # when the newest result was read, or the first of `launched` begun

        self.saver = Saver(
            world,
            paths,
            async_save=spec.machine.async_save,
            check_may_write=functools.partial(_check_may_write, spec, paths),
            parts_arrive=spec.machine.stage.results == "first_node" and spec.nodes > 1,
        )
        self.saver.hold_updates(start.optimizers)
        self.throughput = metrics.Throughput(
            tokens_per_step=self.settings.batch_size * self.settings.seq_len,
            flops_per_token=self.model.flops_per_token(self.settings.seq_len),
            world_size=world.rank.world_size,
            peak_flops=metrics.peak_flops(device_name(world.device)),
        )
        self.budget = ShutdownBudget.of(spec, self.num_parameters, steps_ahead=self.most_launched)
        known = spec.train_task.interruptions
        self.clock = SaveClock(self.settings.checkpoint_minutes, known, self.budget.saves)
        self.progress = RankProgress(
            spec.directory, f"train {config.run}", self.settings.max_steps, "steps"
        )

    # --- the loop ------------------------------------------------------------------------------

    def run(self, stop: StopFlag) -> RankRecord:
        """Train to train.max_steps or to a stop; commits the last state, unless that is step 0.

        At step 0 nothing is lost without a commit. Reading AdamW's state before its first step advances
        its counter, so that the resumed run would end with other weights.
        """
        settings = self.settings
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
        """Return whether an action that is done every `every` steps, and after the last step, is due
        after `step` steps; by default now."""
        step = self.step if step is None else step
        return step % every == 0 or step == self.settings.max_steps

    def _checkpoint_is_due(self, agreed: Agreement) -> bool:
        """Return whether to save now, by steps or time. Not after the last step, which is saved after the
        loop."""
        by_steps = self.step % self.settings.checkpoint_every == 0
        return self.step < self.settings.max_steps and (by_steps or agreed.checkpoint_overdue)

    def _train_one_step(self, stop: StopFlag) -> Agreement:
        """Launch a step, and read the results of those that were launched early enough. What the ranks
        agreed in the newest of these, if in any. Raises as `_take`."""
        if not self.launched:
            self.read_at = time.perf_counter()
        flags = functools.partial(self._flags, stop)
        self.launched.append(self.start.train_step(self.step, flags))
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
        unless train.on_nonfinite or train.spike lets the update be skipped."""
        self.lr, done = result.lr, result.step + 1
        now = time.perf_counter()
        seconds, self.read_at = now - self.read_at, now
        self.throughput.add_step(seconds)
        if done > self.start.step + 1:  # the first step of a launch is slower
            self.budget.measure_step(seconds)
        if fatal := self.skipped.count(result.trouble, self.settings, is_spike=result.is_spike):
            raise self._diverged(fatal, step=done, is_spike=result.is_spike)
        if result.trouble and self.world.rank.is_main:
            in_a_row = self.skipped.in_a_row
            self._record(events.Skipped(step=done, in_a_row=in_a_row, reason=result.trouble))
            say(f"warning: the update of step {done} is skipped: {result.trouble}")
        if self._is_due(self.settings.log_every, done):
            self._log(result, done)
        return Agreement.of(result.flags)

    def _flags(self, stop: StopFlag) -> list[float]:
        """The flags that this rank sends to the others."""
        cause, overdue = stop.cause(), False
        if self.world.rank.is_main:
            overdue = self.clock.is_due()
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
            compiled=self.parallel.is_compiled,
        )
        metrics.write(self.paths.metrics, line)
        self.progress(step, f"loss {result.loss:.3f}, {tokens_per_sec:,.0f} tokens/s")

    def evaluate(self) -> None:
        """Write the validation loss to metrics and event log. TrainingError if it is not finite."""
        started = time.perf_counter()
        mix = self.mix.at_start if self.mix else None
        result = measured(self.parallel, self.val_windows, self.text_bytes, mix, self.step)
        if not result.is_finite:
            raise self._diverged(f"validation loss {result.by_source} is not finite")
        if self.world.rank.is_main:
            line = metrics.EvalLine(launch=self.launch, step=self.step, **result.keys)
            metrics.write(self.paths.metrics, line)
            seconds = round(time.perf_counter() - started, 3)
            self.budget.measure_evaluation(seconds)
            self._record(events.Eval(seconds=seconds, step=self.step, **result.keys))
            say(f"step {self.step}: validation loss {result}")

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
        state = storage.training_state(self.model, self.start.optimizers)
        settings = self.settings
        begun = self.saver.start(
            state,
            self.start.manifest(self.step, self.skipped, reference),
            keep_last=settings.keep_last,
            keep_every=settings.keep_every,
            last=last,
        )
        begun.stall = time.perf_counter() - started  # includes the reference losses
        self.saved_step = self.step
        self.clock.begin()
        if last:
            self._finish_save()

    def _finish_save(self) -> None:
        """Wait for the save in progress, if there is one, and record it. Raises as Saver.finish does."""
        done = self.saver.finish()
        if done is None or not self.world.rank.is_main:
            return
        assert done.seconds is not None and done.checkpoint is not None
        seconds, stall = round(done.seconds, 3), round(done.stall, 3)
        save = events.Save(
            step=done.step,
            seconds=seconds,
            stall=stall,
            bytes=done.size,
            digest=done.checkpoint.digest,
        )
        self._record(save)
        say(f"step {done.step}: committed {done.checkpoint.folder}")
        self.budget.saves.own.append(save)
        self._tell_interval()
        if warning := self.budget.warning():
            self._record(events.Budget(needed=round(self.budget.needed, 1)))
            say(f"warning: {warning}")

    def _tell_interval(self) -> None:
        """Record and print the interval between checkpoints where it was chosen anew. Rank 0."""
        if forecast := self.clock.changed(self.step):
            self._record(forecast)
            say(f"step {self.step}: {told(forecast)}")

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
                numerics=numerics(self.world.device, self.parallel.precision),
                why_not_compiled=self.parallel.why_not_compiled,
            )
        )
        fp8 = f" with products in float8 ({self.settings.fp8})" if self.settings.fp8 else ""
        compiled = ", compiled," if self.parallel.is_compiled else ""
        say(
            f"train {self.config.run}: {self.num_parameters:,} parameters, {self.parallel.precision}{fp8}"
            f"{compiled} on {self.world.rank.world_size} x {self.world.device.type}, step {self.step} of"
            f" {self.settings.max_steps}"
        )
        self._tell_interval()

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
    Watchdog(
        spec,
        world.rank.rank,
        lambda: dump_collectives(world),
        collectives=lambda: collectives(world),
    ).start()
    prepare(world.device, deterministic=config.train.deterministic)
    task = spec.train_task
    tokens = verified_tokens(task, world)
    trainer = Trainer(
        config,
        paths,
        world,
        spec,
        start=start_of_run(config, paths, world, tokens, spec),
        val_windows=windows_by_source(tokens, "val", config.train.seq_len),
    )
    trainer.announce(time.time() - task.started)
    try:
        return trainer.run(stop)
    except Exception as err:
        note_gpu_error(err, world.rank.rank, spec)
        trainer.saver.drain(drain_sec(err, spec.machine.stop_grace_sec))
        raise


def drain_sec(err: Exception, grace_sec: float) -> float:
    """Seconds for a save in progress after this error. It may still be committed, unless it waits for a
    lost rank, or for a GPU that computes nothing any more; one without enough memory computes on."""
    is_broken = of_gpu_error(err) is not None
    return PEERS_SAVE_SEC if is_broken or is_peer_loss(err) else grace_sec


def _check_may_write(spec: LaunchSpec, paths: RunPaths) -> None:
    """UnfitError where another command has the run by now, as the job may run on other nodes than this
    one, which lost its network; or where the run's directory was removed."""
    check_held(paths.root, spec.launcher)
    spec.check_run_is_there()
