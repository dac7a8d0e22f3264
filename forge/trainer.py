"""The training loop of one rank: resume, steps, evaluation, checkpoints, agreed stops."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from forge import checkpoints, ledger, metrics, optim, points, slurm, store
from forge.config import Config
from forge.console import RankProgress
from forge.errors import DataError, Exit, TrainingError, UnfitError
from forge.grace import SLURM_LATE_SEC, Grace
from forge.launch import hostname
from forge.launcher import Record, Spec
from forge.lease import check_held
from forge.lineage import lineage, versions
from forge.loader import Loader, Windows, eval_batches
from forge.manifest import digest_file
from forge.model import Decoder
from forge.numerics import PROBE_SAMPLES, numerics, precision, prepare, probe_samples
from forge.paths import RunPaths, tokenizer_folder
from forge.progress import Progress, say
from forge.saver import Saver
from forge.shards import MANIFEST, ShardSet
from forge.stopping import CAUSES, StopFlag
from forge.world import World, is_peer_loss, named

# After the loss of a rank a save that needs nothing of it has this long to end.
PEERS_SAVE_SEC = 5.0


class Trainer:
    """One rank's share of a run, from resume to the last commit. Every method: all ranks call it."""

    def __init__(
        self, config: Config, paths: RunPaths, world: World, shards: ShardSet, spec: Spec
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
        self.model.to(world.device)
        if self.settings.parallel == "fsdp2":
            _shard(self.model, world, self.precision)
        self.optimizer = optim.make_optimizer(self.model, self.settings)
        self.step = 0  # completed steps
        self.saved_step = 0  # of the newest checkpoint, be it still on its way
        self.saved_at = time.monotonic()
        self.saver = Saver(
            world,
            paths,
            beside=spec.machine_settings.save_beside,
            # A node that was cut off may find that its job has gone on elsewhere.
            before_commit=lambda: check_held(paths.root, spec.launcher),
        )
        self.grace = _grace(spec)
        self.rate = self.settings.lr  # of the last step
        self.train_sec = 0.0  # in steps since the last metrics line
        self.logged_step = 0
        self.peak_flops = (
            metrics.peak_flops(torch.cuda.get_device_name(world.device))
            if world.device.type == "cuda"
            else None
        )
        self.flops_per_token = self.model.flops_per_token(self.settings.seq_len)
        self.num_parameters = self.model.num_parameters()
        self.forward: torch.nn.Module = self.model

    # --- start ---------------------------------------------------------------------------------

    def resume(self) -> None:
        """Load the newest checkpoint whose files are as their manifest says, if there is one.

        Damaged ones go to quarantine. DataError if it was trained on other data.
        """
        found = self._newest_verified()
        self.decay_steps = store.frozen_decay_steps(self.config, found)
        self.lineage = self._lineage()
        if found is None:
            return
        self.world.on_main(lambda: self._check_lineage(found), "check of the lineage")
        checkpoints.load_state(self.model, self.optimizer, found.folder, self.world)
        points.reach("load.done", found.folder)
        self.step = self.logged_step = self.saved_step = found.step
        if self.world.rank.is_main:
            say(f"resume from {found.folder}")

    def _newest_verified(self) -> store.Checkpoint | None:
        """Reads every byte of it, the files shared out among the ranks."""
        share = (self.world.rank.rank, self.world.rank.world_size)
        lost = False
        while (found := store.latest(self.paths)) is not None:
            mine = self.world.together(partial(_bad_files, found, share), "check of digests")
            damage = [bad for part in self.world.gather_objects(mine, "damage") for bad in part]
            if not damage:
                return found
            lost = True
            self.world.on_main(partial(store.quarantine, self.paths, found.folder, damage))
        if lost:
            refuse = self.spec.options["require_checkpoint"]
            self.world.on_main(partial(store.begin_afresh, self.paths, refuse))
        return None

    def _check_lineage(self, found: store.Checkpoint) -> None:
        lineage = found.manifest["lineage"]
        for name, now in (
            ("tokens", self.shards.digest),
            ("tokenizer", self._tokenizer_digest()),
        ):
            then = lineage[name]["digest"]
            if then != now:
                raise DataError(
                    f"the {name} of this run have digest {now[:12]}, {found.folder} was trained"
                    f" with {then[:12]}",
                    cause="the corpus or the tokenizer was edited in place and made again",
                    fix="restore the old input, or give the run a new name",
                )

    def _lineage(self) -> dict[str, Any]:
        """What made the run's next checkpoints: asked once, the code in memory does not change."""
        found = lineage(
            self.config,
            tokenizer_digest=self._tokenizer_digest(),
            tokens_digest=self.shards.digest,
        )
        return {**found, "numerics": numerics(self.world.device, self.precision)}

    def _tokenizer_digest(self) -> str:
        assert self.config.ids
        folder = tokenizer_folder(self.config.data, self.config.ids.tokenizer)
        return digest_file(folder / "tokenizer.json")

    def wrap(self) -> None:
        """Compile and replicate the model, as the config says."""
        if self.settings.compile:
            self.forward = self._compiled()
        if self.settings.parallel == "ddp" and self.world.rank.world_size > 1:
            self.forward = DistributedDataParallel(self.forward, gradient_as_bucket_view=True)

    def _compiled(self) -> torch.nn.Module:
        """The compiled model, proven by one forward and backward on every rank, else the plain one."""
        error = ""
        compiled: Any = None
        if self.world.device.type == "cpu" and not (shutil.which("c++") or shutil.which("g++")):
            error = "no C++ compiler on the PATH"
        else:
            compiled = torch.compile(self.model)
            micro = self._micro_size()
            tokens = torch.zeros(micro, self.settings.seq_len, dtype=torch.int64)
            tokens = tokens.to(self.world.device)
            try:
                with self._autocast():
                    compiled(tokens, tokens).backward()
            except Exception as err:
                # Whatever the compiler stack raises, training without it is right, only slower.
                error = f"{type(err).__name__}: {err}".splitlines()[0]
            self.optimizer.zero_grad(set_to_none=True)
        if any(row[0] for row in self.world.gather([float(bool(error))])):
            say(f"warning: training without torch.compile: {error or 'it failed on another rank'}")
            return self.model
        return compiled

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
        self._finish_save()
        if self.step > 0:
            self.save(last=True)
        if self.step < goal:
            return Record("stopped", self.world.rank.rank, Exit.STOPPED, self.step, cause)
        digest = checkpoints.weights_digest(self.model)
        if self.world.rank.is_main:
            ledger.record(self.paths.events, "completed", step=self.step, weights_digest=digest)
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
        """One optimizer step; the loss averaged over ranks. TrainingError if it is not finite."""
        started = time.perf_counter()
        # Dropout depends on (seed, step, rank) only: a resumed run draws what it would have drawn.
        torch.manual_seed(_mix(self.settings.seed, self.step, self.world.rank.rank))
        self.rate = optim.learning_rate(self.step, self.settings, self.decay_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
        with named(f"all-reduce of gradients in step {self.step + 1}"):
            local_loss = self._backward()
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.grad_clip)
            self.grad_norm = _number(norm)
        table = self.world.gather([local_loss, self.grad_norm], f"losses of step {self.step + 1}")
        self._refuse_non_finite(table)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        seconds = time.perf_counter() - started
        self.train_sec += seconds
        self.grace.measure_step(seconds)
        return sum(row[0] for row in table) / len(table)

    def _backward(self) -> float:
        """Gradients of this rank's samples, accumulated over micro-batches; their mean loss."""
        points.reach("data.read")
        inputs, targets = self.loader.batch(self.step)
        micro = self._micro_size()
        parts = list(zip(inputs.split(micro), targets.split(micro), strict=True))
        total = torch.zeros((), device=self.world.device)
        for number, (tokens, wanted) in enumerate(parts):
            with self._synchronised(number == len(parts) - 1), self._autocast():
                loss = self.forward(
                    tokens.to(self.world.device, non_blocking=True),
                    wanted.to(self.world.device, non_blocking=True),
                )
                share = len(tokens) / len(inputs)
                (loss * share).backward()
                total += loss.detach() * share
        return float(total)

    def _micro_size(self) -> int:
        return self.settings.micro_batch_size or (
            self.settings.batch_size // self.world.rank.world_size
        )

    @contextmanager
    def _synchronised(self, last: bool) -> Iterator[None]:
        """Gradients are averaged over ranks in the last micro-batch only."""
        if isinstance(self.forward, DistributedDataParallel):
            with nullcontext() if last else self.forward.no_sync():
                yield
        else:
            if self.settings.parallel == "fsdp2":
                self.model.set_requires_gradient_sync(last)  # type: ignore[operator]
            yield

    def _autocast(self) -> AbstractContextManager[Any]:
        # FSDP2 casts by its own policy.
        if self.precision == "bf16" and self.settings.parallel == "ddp":
            return torch.autocast(self.world.device.type, torch.bfloat16)
        return nullcontext()

    def _refuse_non_finite(self, table: list[list[float]]) -> None:
        for rank, (loss, norm) in enumerate(table):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise self._diverged(
                    f"loss {loss} and gradient norm {norm} on rank {rank} are not finite; the"
                    " weights were not updated"
                )

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
            cause=f"a learning rate ({self.rate:.2g}) too high, or broken data",
            fix="lower train.lr or raise train.warmup_steps under a new run name",
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
            micro=self._micro_size(),
        ):
            total += self._loss(inputs, targets) * counted
            tokens += counted
        self.model.train()
        table = self.world.gather([total, float(tokens)], "held-out losses")
        loss = sum(row[0] for row in table) / sum(row[1] for row in table)
        if not math.isfinite(loss):
            raise self._diverged(f"held-out loss {loss} is not finite")
        if rank.is_main:
            metrics.write(self.paths.metrics, "eval", self.launch, self.step, loss=loss)
            seconds = round(time.perf_counter() - started, 3)
            ledger.record(self.paths.events, "eval", step=self.step, seconds=seconds, loss=loss)
            say(f"step {self.step}: held-out loss {loss:.4f}")

    def _loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        # FSDP2 gathers weights by hooks that a compiled or replicated wrapper does not add to.
        with self._autocast():
            loss = self.model(inputs.to(self.world.device), targets.to(self.world.device))
        if self.settings.parallel == "fsdp2":
            # It keeps the outermost weights whole for a backward, which does not come here; the
            # state of the optimizer, asked for next, belongs to the shards.
            self.model.reshard()  # type: ignore[operator]
        return float(loss)

    # --- checkpoints ---------------------------------------------------------------------------

    def save(self, *, last: bool = False) -> None:
        """Begin to commit a checkpoint of this step, unless it is committed already.

        last: nothing is trained after it, so wait for it.
        """
        self._finish_save()
        if self.saved_step == self.step:
            return
        probe = self._probe()
        self._refuse_broken_losses(probe["losses"])
        state = checkpoints.training_state(self.model, self.optimizer)
        settings = self.settings
        self.saver.start(
            state,
            self._manifest(probe),
            keep_last=settings.keep_last,
            keep_every=settings.keep_every,
            last=last,
        )
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
        ledger.record(self.paths.events, "save", step=done.step, **facts, bytes=done.size)
        say(f"step {done.step}: committed {done.checkpoint.folder}")
        self.grace.measure_save(done.seconds, done.stall)
        if warning := self.grace.warning():
            ledger.record(self.paths.events, "grace", needed=round(self.grace.needed, 1))
            say(f"warning: {warning}")

    def _manifest(self, probe: dict[str, Any]) -> dict[str, Any]:
        return {
            "step": self.step,
            "world_size": self.world.rank.world_size,
            "decay_steps": self.decay_steps,
            "next_sample": self.step * self.settings.batch_size,
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
        loss = self._loss(window[:, :-1], window[:, 1:])
        self.model.train()
        return {
            "samples": PROBE_SAMPLES,
            "losses": [row[0] for row in self.world.gather([loss], "probe")],
        }

    def announce(self, seconds: float) -> None:
        """The `init` event: where this start began and on what."""
        if not self.world.rank.is_main:
            return
        ledger.record(
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


def _shard(model: Decoder, world: World, precision: str) -> None:
    """FSDP2: each block is a unit; with bf16 the fp32 shards are cast as they are gathered."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(world.device.type, (world.rank.world_size,))
    policy = MixedPrecisionPolicy()
    if precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def _bad_files(checkpoint: store.Checkpoint, share: tuple[int, int]) -> list[str]:
    return list(checkpoint.bad_files(share=share))


def _grace(spec: Spec) -> Grace:
    """What is known of the time that a stop has: the profile's windows, and the job's end."""
    machine, job = spec.machine_settings, spec.job
    windows = {"stop_grace_sec": machine.stop_grace_sec}
    if job and machine.slurm.warn_sec:
        windows["slurm.warn_sec"] = machine.slurm.warn_sec - SLURM_LATE_SEC

    def ask_again() -> float | None:
        with suppress(UnfitError):
            now = slurm.show_job(job, patience_sec=0, timeout_sec=5) if job else None
            return now.end_time if now else None
        return None

    deadline = spec.options.get("deadline")
    return Grace(windows, deadline, ask_again, in_flight=machine.save_beside)


def _number(norm: torch.Tensor) -> float:
    whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return float(whole)


def _mix(seed: int, step: int, rank: int) -> int:
    """One 63-bit seed of three numbers that collides for no step below 2^20 and rank below 2^12."""
    return (seed << 31) ^ (step << 12) ^ rank & (2**63 - 1)


def train(
    config: Config,
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
    shards = world.together(lambda: _open_verified(_shards_folder(spec), world))
    trainer = Trainer(config, paths, world, shards, spec)
    trainer.resume()
    trainer.wrap()
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
