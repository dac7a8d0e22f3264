"""The training loop of one rank: resume, steps, evaluation, checkpoints, agreed stops."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from forge.checkpoint import directory, parent, resume, storage
from forge.checkpoint.async_saver import Saver
from forge.cluster import slurm
from forge.cluster.lock import check_held
from forge.core import event_log, failpoints
from forge.core.config import ResolvedConfig
from forge.core.errors import Exit, TrainingError, UnfitError
from forge.core.files import digest_file
from forge.core.paths import RunPaths, tokenizer_folder
from forge.core.process import hostname
from forge.core.provenance import lineage, versions
from forge.core.terminal import Progress, say
from forge.data.loader import Loader, Windows, eval_batches
from forge.data.shards import MANIFEST, ShardSet
from forge.launch.launcher import Record, Spec
from forge.launch.process_group import World, is_peer_loss, named
from forge.launch.rank_output import RankProgress
from forge.launch.shutdown_budget import SLURM_LATE_SEC, Grace
from forge.launch.stop_signal import CAUSES, StopFlag
from forge.trainer import metrics, optim
from forge.trainer.llama import Decoder
from forge.trainer.nonfinite import Skipped, not_finite
from forge.trainer.numerics import PROBE_SAMPLES, numerics, precision, prepare, probe_samples
from forge.trainer.parallel import ParallelModel

# After the loss of a rank a save that needs nothing of it has this long to end.
PEERS_SAVE_SEC = 5.0


class Trainer:
    """One rank's share of a run, from resume to the last commit. Every method: all ranks call it."""

    def __init__(
        self, config: ResolvedConfig, paths: RunPaths, world: World, shards: ShardSet, spec: Spec
    ) -> None:
        self.config, self.paths, self.world = config, paths, world
        self.spec, self.launch = spec, spec.launch
        self.settings = config.train
        self.shards = shards
        self.precision = precision(self.settings.precision, world.device)
        rank = world.rank
        self.loader = Loader(
            Windows(shards.train, self.settings.seq_len),
            seed=self.settings.seed,
            batch_size=self.settings.batch_size,
            rank=rank.rank,
            world_size=rank.world_size,
        )
        self.held_out = Windows(shards.val, self.settings.seq_len, split="val")
        self.model = Decoder(config.model, shards.vocab_size, seed=self.settings.seed)
        self.parallel = ParallelModel(self.model, self.settings, world, self.precision)
        self.optimizer = optim.make_optimizer(self.model, self.settings)
        self.step = 0  # completed steps
        self.first_step = 0  # where this start began
        self.saved_step = 0  # of the newest checkpoint, be it still on its way
        self.saved_at = time.monotonic()
        self.saver = Saver(
            world,
            paths,
            beside=spec.machine_settings.save_beside,
            # A node that was cut off may find that its job has gone on elsewhere.
            before_commit=lambda: check_held(paths.root, spec.launcher),
        )
        self.rate = self.settings.lr  # of the last step
        self.skipped = Skipped()
        self.train_sec = 0.0  # in steps since the last metrics line
        self.logged_step = 0
        self.peak_flops = (
            metrics.peak_flops(torch.cuda.get_device_name(world.device))
            if world.device.type == "cuda"
            else None
        )
        self.flops_per_token = self.model.flops_per_token(self.settings.seq_len)
        self.num_parameters = self.model.num_parameters()
        self.grace = _grace(spec, self.num_parameters)

    # --- start ---------------------------------------------------------------------------------

    def resume(self) -> None:
        """Load the newest valid checkpoint, else the parent's, if there is one. DataError if it is of
        other data."""
        require = self.spec.options["require_checkpoint"]
        own = resume.newest_verified(
            self.paths, self.world, require_checkpoint=require, parent_name=self.config.parent
        )
        found = own or resume.verified_parent(self.config, self.world)
        self.decay_steps = directory.frozen_decay_steps(self.config, own)
        self.lineage = self._lineage() | parent.lineage(self.config, own, found)
        if found is not None:
            self.world.on_main(lambda: self._check_data(found), "check of the lineage")
            storage.load_state(self.model, self.optimizer, found.folder, self.world)
            failpoints.reach("load.done", found.folder)
            self.step = self.logged_step = self.saved_step = self.first_step = found.step
            self.skipped = Skipped.of(found.manifest)
            if self.world.rank.is_main:
                say(f"{'resume' if own else 'start'} from {found.folder}")
        self.parallel.wrap()

    def _check_data(self, found: directory.Checkpoint) -> None:
        digests = {name: self.lineage[name]["digest"] for name in ("tokens", "tokenizer")}
        resume.check_same_data(found, **digests)

    def _lineage(self) -> dict[str, Any]:
        """What makes the run's next checkpoints: asked once, the code in memory does not change."""
        folder = tokenizer_folder(self.config.data, self.config.ids.tokenizer)
        found = lineage(
            self.config,
            tokenizer_digest=digest_file(folder / "tokenizer.json"),
            tokens_digest=self.shards.digest,
        )
        return {**found, "numerics": numerics(self.world.device, self.precision)}

    # --- the loop ------------------------------------------------------------------------------

    def run(self, stop: StopFlag) -> Record:
        """Train to the goal or to an agreed stop; the last state is committed either way.

        Not at step 0: nothing is lost there, and to ask AdamW for its state before its first step
        would count as one, so that the run that goes on would end with other weights.
        """
        goal = self.settings.max_steps
        cause, _ = self._agree(stop)
        if self.step == 0 and not cause:
            self.evaluate()
            cause, _ = self._agree(stop)
        report = RankProgress(self.spec.folder, f"train {self.config.run}", goal, "steps")
        while self.step < goal and not cause:
            loss = self._step()
            cause = self._after_step(stop, loss, report)
        if self.step > 0:
            self.save(last=True)
        if self.step < goal:
            return Record("stopped", self.world.rank.rank, Exit.STOPPED, self.step, cause)
        digest = storage.weights_digest(self.model)
        if self.world.rank.is_main:
            event_log.record(self.paths.events, "completed", step=self.step, weights_digest=digest)
        self.world.barrier()
        return Record(
            "completed", self.world.rank.rank, step=self.step, result={"weights_digest": digest}
        )

    def _after_step(self, stop: StopFlag, loss: float, report: Progress) -> str:
        """Metrics, evaluation and checkpoint where they are due; the cause of an agreed stop."""
        settings, done = self.settings, self.step == self.settings.max_steps
        if self.step % settings.log_every == 0 or done:
            tokens_per_sec = self._log(loss)
            if self.world.rank.is_main:
                report(self.step, f"loss {loss:.3f}, {tokens_per_sec:,.0f} tokens/s")
        cause, overdue = self._agree(stop)
        if not cause and (self.step % settings.eval_every == 0 or done):
            self.evaluate()
        if not cause and not done and (overdue or self.step % settings.checkpoint_every == 0):
            self.save()
        return cause

    def _agree(self, stop: StopFlag) -> tuple[str, bool]:
        """The heaviest cause that any rank has for stopping, and whether a checkpoint is overdue by
        the clock, the same on all ranks. Finishes a save whose threads have all ended."""
        mine, overdue = stop.cause(), False
        if self.world.rank.is_main:
            minutes = self.settings.checkpoint_minutes
            overdue = minutes is not None and time.monotonic() - self.saved_at > 60 * minutes
            mine = mine or ("deadline" if self.grace.is_due() else "")
        wish = [float(CAUSES.index(mine)), float(overdue), float(self.saver.is_done())]
        table = self.world.gather(wish, f"agreement after step {self.step}")
        if all(row[2] for row in table):
            self._finish_save()
        return CAUSES[int(max(row[0] for row in table))], bool(table[0][1])

    def _step(self) -> float:
        """One optimizer step; the loss averaged over ranks. TrainingError if it is not finite, unless
        train.on_nonfinite lets the update be skipped."""
        started = time.perf_counter()
        # Dropout depends on (seed, step, rank) only: a resumed run draws what it would have drawn.
        torch.manual_seed(_mix(self.settings.seed, self.step, self.world.rank.rank))
        self.rate = optim.learning_rate(self.step, self.settings, self.decay_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
        with named(f"all-reduce of gradients in step {self.step + 1}"):
            failpoints.reach("data.read")
            local_loss = self.parallel.backward(*self.loader.batch(self.step))
            self.grad_norm = self.parallel.clip_gradients(self.settings.grad_clip)
        table = self.world.gather([local_loss, self.grad_norm], f"losses of step {self.step + 1}")
        if trouble := not_finite(table):
            self._skip_update(trouble)
        else:
            self.optimizer.step()
            self.skipped.in_a_row = 0
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        seconds = time.perf_counter() - started
        self.train_sec += seconds
        if self.step > self.first_step + 1:  # the first one warms up
            self.grace.measure_step(seconds)
        return sum(row[0] for row in table) / len(table)

    def _skip_update(self, trouble: str) -> None:
        """Count this step without its update. TrainingError where the config does not allow that.

        The first update of a run is never skipped: before it AdamW has no state that could be saved.
        """
        refusal = self.skipped.refusal(self.settings)
        if not refusal and not self.optimizer.state:
            refusal = "the first update of a run cannot be skipped"
        if refusal:
            raise self._diverged(f"{trouble}; {refusal}")
        self.skipped.count()
        if self.world.rank.is_main:
            facts = {"step": self.step + 1, "in_a_row": self.skipped.in_a_row, "reason": trouble}
            event_log.record(self.paths.events, "skipped", **facts)
            say(f"warning: the update of step {self.step + 1} is skipped: {trouble}")

    def _refuse_broken_losses(self, losses: list[float]) -> None:
        """TrainingError if the last update broke the weights: `latest` must stay fit to go on from.

        That every number of the state is finite is looked at when it is written.
        """
        if not all(map(math.isfinite, losses)):
            raise self._diverged(
                f"the losses {losses} on held-out samples are not finite; no checkpoint was committed"
            )

    def _diverged(self, what: str) -> TrainingError:
        return TrainingError(
            f"step {self.step}: {what}",
            cause=f"a learning rate too high (train.lr is {self.settings.lr:.2g}, this step's rate was"
            f" {self.rate:.2g}), or broken data",
            fix=f"{parent.way_on(self.config, self.saved_step)}; where single batches are to blame,"
            " train.on_nonfinite=skip goes on without them",
        )

    # --- looking at it -------------------------------------------------------------------------

    def _log(self, loss: float) -> float:
        """Write a metrics line; tokens per second over all ranks since the last one."""
        tokens_per_step = self.settings.batch_size * self.settings.seq_len
        tokens_per_sec = (self.step - self.logged_step) * tokens_per_step / self.train_sec
        if self.world.rank.is_main:
            world_size = self.world.rank.world_size
            metrics.write(
                *(self.paths.metrics, "train", self.launch, self.step),
                loss=loss,
                grad_norm=self.grad_norm,
                lr=self.rate,
                tokens_per_sec=round(tokens_per_sec, 1),
                mfu=metrics.flop_utilisation(
                    tokens_per_sec, self.flops_per_token, world_size, self.peak_flops
                ),
                tokens=self.step * tokens_per_step,
            )
        self.train_sec, self.logged_step = 0.0, self.step
        return tokens_per_sec

    @torch.no_grad()
    def evaluate(self) -> None:
        """Mean loss over the fixed held-out windows, into metrics and ledger."""
        started = time.perf_counter()
        rank = self.world.rank
        self.model.eval()
        total, tokens = 0.0, 0
        for inputs, targets, counted in eval_batches(
            self.held_out,
            self.settings.eval_samples,
            rank=rank.rank,
            world_size=rank.world_size,
            micro=self.parallel.micro_size,
        ):
            total += self.parallel.loss(inputs, targets) * counted
            tokens += counted
        self.model.train()
        table = self.world.gather([total, float(tokens)], "held-out losses")
        loss = sum(row[0] for row in table) / sum(row[1] for row in table)
        if not math.isfinite(loss):
            raise self._diverged(f"held-out loss {loss} is not finite")
        if rank.is_main:
            metrics.write(self.paths.metrics, "eval", self.launch, self.step, loss=loss)
            seconds = round(time.perf_counter() - started, 3)
            self.grace.measure_evaluation(seconds)
            event_log.record(self.paths.events, "eval", step=self.step, seconds=seconds, loss=loss)
            say(f"step {self.step}: held-out loss {loss:.4f}")

    # --- checkpoints ---------------------------------------------------------------------------

    def save(self, *, last: bool = False) -> None:
        """Begin to commit a checkpoint of this step, unless it is committed already.

        last: nothing is trained after it, so wait for it.
        """
        self._finish_save()
        if self.saved_step == self.step:
            return
        started = time.perf_counter()
        probe = self._probe()
        self._refuse_broken_losses(probe["losses"])
        state = storage.training_state(self.model, self.optimizer)
        settings = self.settings
        begun = self.saver.start(
            state,
            self._manifest(probe),
            keep_last=settings.keep_last,
            keep_every=settings.keep_every,
            last=last,
        )
        begun.stall = time.perf_counter() - started  # with the probe
        self.saved_step, self.saved_at = self.step, time.monotonic()
        if last:
            self._finish_save()

    def _finish_save(self) -> None:
        """Wait for the save under way, if there is one, and tell of it. Raises what ended it."""
        done = self.saver.finish()
        if done is None or not self.world.rank.is_main:
            return
        assert done.seconds is not None and done.checkpoint is not None
        facts = {"seconds": round(done.seconds, 3), "stall": round(done.stall, 3)}
        event_log.record(self.paths.events, "save", step=done.step, **facts, bytes=done.size)
        say(f"step {done.step}: committed {done.checkpoint.folder}")
        self.grace.measure_save(done.seconds, done.stall)
        if warning := self.grace.warning():
            event_log.record(self.paths.events, "grace", needed=round(self.grace.needed, 1))
            say(f"warning: {warning}")

    def _manifest(self, probe: dict[str, Any]) -> dict[str, Any]:
        return {
            "step": self.step,
            "world_size": self.world.rank.world_size,
            "decay_steps": self.decay_steps,
            "next_sample": self.step * self.settings.batch_size,
            "skipped": asdict(self.skipped),
            "probe": probe,
            "lineage": self.lineage,
        }

    @torch.no_grad()
    def _probe(self) -> dict[str, Any]:
        """Loss of each rank on its own few held-out samples, which validation recomputes."""
        rank = self.world.rank
        samples = probe_samples(self.held_out.num_samples, rank.rank)
        window = torch.from_numpy(self.held_out.gather(samples))
        self.model.eval()
        loss = self.parallel.loss(window[:, :-1], window[:, 1:])
        self.model.train()
        return {
            "samples": PROBE_SAMPLES,
            "losses": [row[0] for row in self.world.gather([loss], "probe")],
        }

    def announce(self, seconds: float) -> None:
        """The `init` event: where this start began and on what."""
        if not self.world.rank.is_main:
            return
        event_log.record(
            self.paths.events,
            "init",
            launch=self.launch,
            seconds=round(seconds, 3),
            step=self.step,
            world_size=self.world.rank.world_size,
            parameters=self.num_parameters,
            versions=versions(),
            **numerics(self.world.device, self.precision),
        )
        say(
            f"train {self.config.run}: {self.num_parameters:,} parameters, {self.precision}"
            f" on {self.world.rank.world_size} x {self.world.device.type}, step {self.step} of"
            f" {self.settings.max_steps}"
        )


# --- parts ---------------------------------------------------------------------------------------


def _grace(spec: Spec, num_weights: int) -> Grace:
    """What is known of the time that a stop has: the profile's windows, and the job's end."""
    machine, job = spec.machine_settings, spec.job
    windows = {"stop_grace_sec": machine.stop_grace_sec}
    if job and machine.slurm.warn_sec:
        windows["slurm.warn_sec"] = machine.slurm.warn_sec - SLURM_LATE_SEC

    def ask_again() -> float | None:
        with suppress(UnfitError):
            now = slurm.show_job(job, patience_sec=0, timeout_sec=5) if job else None
            if now and now.end_time:
                return min(now.end_time, spec.options.get("own_deadline") or math.inf)
        return None

    deadline = spec.options.get("deadline")
    return Grace(
        windows, deadline, ask_again, num_weights=num_weights, in_flight=machine.save_beside
    )


def _mix(seed: int, step: int, rank: int) -> int:
    """One 63-bit seed of three numbers. Within a run it collides for no rank below 2^12."""
    return (seed << 31) ^ (step << 12) ^ rank


def train(
    config: ResolvedConfig,
    paths: RunPaths,
    world: World,
    stop: StopFlag,
    spec: Spec,
) -> Record:
    """Train one run on this rank to its goal or an agreed stop. All ranks call it.

    spec.options: `shards`, the folders to read, `staged` by host, else `shared`; `started`, epoch
    seconds when the launcher began.
    """
    prepare(world.device)
    shards = world.patiently(lambda: _open_verified(_shards_folder(spec), world), "check of shards")
    trainer = Trainer(config, paths, world, shards, spec)
    trainer.resume()
    trainer.announce(time.time() - spec.options["started"])
    try:
        return trainer.run(stop)
    except Exception as err:
        # A save under way may still be committed, unless it waits for a rank that is gone.
        grace_sec = spec.machine_settings.stop_grace_sec
        trainer.saver.drain(PEERS_SAVE_SEC if is_peer_loss(err) else grace_sec)
        raise


def _shards_folder(spec: Spec) -> Path:
    """Where this node's ranks read: what was staged here, else the shared folder."""
    shards = spec.options["shards"]
    staged = Path(shards["staged"].get(hostname(), shards["shared"]))
    if (staged / MANIFEST).exists():
        return staged
    say(f"{staged} is gone, reading the shards from the shared folder")
    return Path(shards["shared"])


def _open_verified(folder: Path, world: World) -> ShardSet:
    """The shards, digests checked, the work shared among the ranks of a node."""
    shards = ShardSet.open(folder)
    shards.verify((world.rank.local_rank, world.rank.local_world_size))
    return shards
