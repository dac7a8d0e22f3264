"""Replay check: load a checkpoint in fresh ranks, train a few steps, compare with the recorded losses.

The reference-batch losses prove the weights of a checkpoint. That its optimizer state, schedule and
position in the data are right shows only in the losses of the following steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from forge.checkpoint import directory
from forge.checkpoint.manifest import Lineage, Numerics
from forge.core import events
from forge.core.config import ResolvedConfig
from forge.core.errors import DataError, Exit, TrainingError, UnfitError
from forge.core.files import write_json
from forge.core.machine import Machine
from forge.core.paths import RunPaths, tokens_folder
from forge.core.provenance import cpu_name, versions
from forge.core.records import Check
from forge.core.scratch import scratch_directory
from forge.core.terminal import duration
from forge.core.train_settings import ranks_per_copy
from forge.hosts.network import available_cores, available_memory
from forge.hosts.placement import WorldLayout
from forge.launch.launcher import run_ranks
from forge.launch.rank_records import RankRecord, ReplayResult, ReplayTask, Task
from forge.trainer import metrics
from forge.validation.estimates import BYTES_OF_STATE, cpu_seconds

# Largest difference of a recomputed and a recorded loss where device, number of threads or arithmetic
# differ. Under equal conditions they must be bitwise equal.
TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2, "fp8": 5e-2}
# The next recorded loss is looked for in this many steps: twice the default of train.log_every.
MOST_STEPS = 10
DEADLINE_SEC = 600.0
RANKS_PER_CORE = 2
Device = Literal["cpu", "cuda"]
NOT_RECORDED, NOT_DONE = "not recorded", "not done"
OTHER_DROPOUT = (
    "dropout masks differ from those of the training (device, launch, compile or torch differ)"
)


def same_arithmetic(lineage: Lineage, now: Numerics) -> bool:
    """Tell whether losses and weights computed here with the numerics `now` are bitwise equal to those of
    the training. Never on a GPU, which adds in any order."""
    return (
        now == lineage.numerics
        and now.device == "cpu"
        and lineage.versions.torch == versions()["torch"]
        and lineage.hardware.cpu == cpu_name()
    )


def tolerance_for(precision: str, exact: bool) -> tuple[float, str]:
    """Largest difference of a recomputed and a recorded loss, and the words for it."""
    tolerance = 0.0 if exact else TOLERANCE[precision]
    return tolerance, "bitwise equal" if exact else f"within {tolerance:g}"


# --- fresh ranks -----------------------------------------------------------------------------------


def visible_gpus(checkpoint: directory.Checkpoint) -> int:
    """Number of GPUs that this process sees, for a checkpoint that GPUs have trained; else 0."""
    if checkpoint.manifest.lineage.numerics.device != "cuda":
        return 0
    import torch

    return torch.cuda.device_count()


def run_here(
    task: Task,
    config: ResolvedConfig,
    checkpoint: directory.Checkpoint,
    num_ranks: int,
    device: Device,
    *,
    overrides: dict[str, Any] | None = None,
    deadline_sec: float = DEADLINE_SEC,
) -> RankRecord:
    """Run a task in fresh ranks on this host; the record of the ranks.

    config: where the data are. overrides: of the config in the checkpoint, which the ranks get.
    """
    machine = _machine(num_ranks, device)
    with scratch_directory("reload") as scratch:
        # A run's directory in scratch: that of the checkpoint may be read-only, or not of a run.
        config_of_ranks = checkpoint.config(
            {
                **{"run": "reload", "results": str(scratch), "data": config.data, "parent": None},
                # It may begin with the parent's step; the manifest has the mix with that of the parent.
                "train.mix": None,
                **(overrides or {}),
            }
        )
        paths = RunPaths.of(config_of_ranks)
        write_json(paths.config, config_of_ranks.to_json())
        layout = WorldLayout(1, num_ranks)
        record = run_ranks(task, paths, machine, layout, deadline_sec=deadline_sec)
    if record.status == "stopped":
        raise KeyboardInterrupt  # the user stopped validation; nothing is known of the checkpoint
    return record


def _machine(num_ranks: int, device: Device) -> Machine:
    return Machine(launcher="torchrun" if num_ranks > 1 else "single", device=device)


def shards_folder(config: ResolvedConfig) -> str:
    """The shards of a config, for ranks in any working directory."""
    return str(tokens_folder(config.data, config.ids.tokens).resolve())


def load_on_two_ranks(config: ResolvedConfig, checkpoint: directory.Checkpoint) -> str:
    """Weights digest of a checkpoint as two Gloo ranks load it, sharded.

    Raises DataError where it cannot be loaded, UnfitError where the ranks cannot be run.
    """
    record = _train_on(config, checkpoint, 2, checkpoint.step, "cpu")
    if record.status != "completed":
        kind = DataError if record.code == Exit.DATA else UnfitError
        raise kind(f"cannot be loaded by 2 ranks: {record.message}")
    assert record.weights_digest
    return record.weights_digest


def window_losses(
    config: ResolvedConfig, checkpoint: directory.Checkpoint, step: int
) -> list[float | None]:
    """Loss of each window that a step has read, in the order of its batch, in nats per token; None where
    it is not finite. By the weights before the step: the steps from the checkpoint to it are trained
    again, by one rank on this host. UnfitError where that fails.
    """
    device: Device = "cuda" if visible_gpus(checkpoint) else "cpu"
    record = _train_on(config, checkpoint, 1, step - 1, device, next_windows=True)
    if record.status != "completed":
        raise UnfitError(
            f"the steps after {checkpoint.folder} cannot be retrained here: {record.message}",
            fix="run the command on a node like those that trained the run",
        )
    assert isinstance(record.result, ReplayResult)
    return record.result.windows


def _train_on(
    config: ResolvedConfig,
    checkpoint: directory.Checkpoint,
    num_ranks: int,
    step: int,
    device: Device,
    *,
    next_windows: bool = False,
) -> RankRecord:
    """Load in fresh ranks on this host and train up to `step`; the record of the ranks."""
    manifest = checkpoint.manifest
    task = ReplayTask(
        checkpoint=str(checkpoint.folder.resolve()),
        shards=shards_folder(config),
        threads=manifest.lineage.numerics.cpu_threads,
        next_windows=next_windows,
    )
    overrides = {
        "train.max_steps": step,
        "train.decay_steps": manifest.decay_steps,
        "train.precision": manifest.lineage.numerics.precision,
        # Compiling takes longer than the rest; the tolerance covers the difference.
        "train.compile": False,
        # Steps that training skipped are skipped here too, whatever the config said first.
        "train.on_nonfinite": "skip",
        "train.spike": config.train.spike and "skip",
        # Counted on from the checkpoint, which may be amid a series of them.
        "train.max_skipped_steps": manifest.skipped.in_a_row + step - checkpoint.step + 1,
    }
    return run_here(task, config, checkpoint, num_ranks, device, overrides=overrides)


# --- the next losses -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recorded:
    """Losses by step that one launch logged after a checkpoint; by_maker: the launch that saved it.
    skipped: the steps whose update it skipped."""

    losses: dict[int, float]
    by_maker: bool
    skipped: frozenset[int] = frozenset()


def recorded_losses(paths: RunPaths, checkpoint: directory.Checkpoint) -> Recorded | None:
    """Losses that one launch with the checkpoint's world size and precision logged after it, None if
    there are none.

    They end with the first that depends on the optimizer state (two steps after the checkpoint), and
    at most MOST_STEPS after it.
    """
    lines = [line for line in metrics.read(paths.metrics) if isinstance(line, metrics.TrainLine)]
    world_size = checkpoint.manifest.world_size
    # Without train.precision a launch on CPUs has another one than on GPUs.
    precision = checkpoint.manifest.lineage.numerics.precision
    log = events.read(paths.events)
    launches = {
        event.launch
        for event in log
        if isinstance(event, events.Init) and event.world_size == world_size
        if event.numerics.get("precision", precision) == precision
    }
    # Recomputed steps are logged again. Lines before the last one up to the checkpoint's step are from
    # an earlier launch.
    done = [number for number, line in enumerate(lines) if line.step <= checkpoint.step]
    maker = lines[done[-1]].launch if done else None
    after: dict[str, dict[int, float]] = {}
    for line in lines[done[-1] + 1 if done else 0 :]:
        near = line.step <= checkpoint.step + MOST_STEPS
        if near and line.launch in launches and line.loss is not None:
            after.setdefault(line.launch, {})[line.step] = line.loss
    if not after:
        return None
    launch = maker if maker in after else list(after)[-1]
    by_step = after[launch]
    last = min((step for step in by_step if step >= checkpoint.step + 2), default=max(by_step))
    losses = {step: loss for step, loss in by_step.items() if step <= last}
    return Recorded(losses, launch == maker, _skipped_by(launch, log))


def _skipped_by(launch: str, log: list[events.Event]) -> frozenset[int]:
    """The steps whose update a launch skipped."""
    skipped, now = set(), ""
    for event in log:
        if isinstance(event, events.Init):
            now = event.launch
        elif isinstance(event, events.Skipped) and now == launch:
            skipped.add(event.step)
    return frozenset(skipped)


def check_next_losses(
    config: ResolvedConfig, checkpoint: directory.Checkpoint, paths: RunPaths | None
) -> Check:
    """Train from a checkpoint in as many fresh ranks as saved it, and compare the losses with those
    that the run recorded. The check says so where none was recorded or this host is too small. On GPUs,
    where they trained it and this host has one for each rank.

    paths: of the checkpoint's run; None for a checkpoint outside of a run.
    """
    recorded = recorded_losses(paths, checkpoint) if paths else None
    if recorded is None:
        where = f"no loss of the {MOST_STEPS} steps after it" if paths else "it is not in a run"
        return Check("next loss", "ok", f"{NOT_RECORDED}: {where}")
    if _dropout_differs(checkpoint, _is_repeatable(checkpoint, recorded)):
        return _not_done(OTHER_DROPOUT)
    ranks, last = checkpoint.manifest.world_size, max(recorded.losses)
    device: Device = "cuda" if visible_gpus(checkpoint) >= ranks else "cpu"
    if device == "cpu" and (
        reason := _too_large(checkpoint) or _too_slow(config, checkpoint, last)
    ):
        return _not_done(reason)
    record = _train_on(config, checkpoint, ranks, last, device)
    if record.status == "completed":
        assert isinstance(record.result, ReplayResult)
        return _compare(checkpoint, recorded, record.result)
    if record.cause in (TrainingError.__name__, DataError.__name__):
        return Check("next loss", "fail", record.message)
    return _not_done(f"{ranks} ranks here: {record.message}")


def _not_done(reason: str) -> Check:
    return Check("next loss", "warn", f"{NOT_DONE}: {reason}")


def _is_repeatable(checkpoint: directory.Checkpoint, recorded: Recorded) -> bool:
    """Return whether the replay computes the same sums. Another launch may have had another micro-batch
    size, a GPU adds in any order, and all ranks of the replay are on one node."""
    lineage = checkpoint.manifest.lineage
    on_cpu, shard = lineage.numerics.device == "cpu", lineage.config.train.shard
    is_eager = bool(checkpoint.manifest.why_not_compiled)
    return recorded.by_maker and on_cpu and is_eager and shard != "node"


def _dropout_differs(checkpoint: directory.Checkpoint, is_same: bool) -> bool:
    """Return whether dropout may draw other masks than in training, which no tolerance covers."""
    return not is_same and checkpoint.manifest.lineage.config.model.dropout > 0


def _too_large(checkpoint: directory.Checkpoint) -> str:
    """Why this host cannot train from the checkpoint on its CPUs; empty if it can."""
    ranks, cores = checkpoint.manifest.world_size, available_cores()
    if ranks > RANKS_PER_CORE * cores:
        by_gpus = checkpoint.manifest.lineage.numerics.device == "cuda"
        gpus = f" and {visible_gpus(checkpoint)} GPUs" if by_gpus else ""
        return f"saved by {ranks} ranks, this host has {cores} cores{gpus}"
    shard = checkpoint.manifest.lineage.config.train.shard
    copies = ranks // ranks_per_copy(shard, ranks, ranks_per_node=ranks)
    needed = _weight_bytes(checkpoint) * BYTES_OF_STATE * copies
    free = available_memory()
    if needed > free:
        return f"{ranks} ranks need {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"
    return ""


def _too_slow(config: ResolvedConfig, checkpoint: directory.Checkpoint, last_step: int) -> str:
    """Why the CPUs of this host cannot repeat steps of GPUs within DEADLINE_SEC; empty if they can."""
    if checkpoint.manifest.lineage.numerics.device == "cpu":
        return ""
    cores = available_cores()
    tokens = (last_step - checkpoint.step) * config.train.batch_size * config.train.seq_len
    # Backward takes twice as long as forward.
    seconds = 3 * cpu_seconds(_weight_bytes(checkpoint) / 4, tokens, cores)
    if seconds <= DEADLINE_SEC:
        return ""
    return (
        f"trained on {checkpoint.manifest.world_size} GPUs, of which this job sees"
        f" {visible_gpus(checkpoint)}; its {cores} cores would take about {duration(seconds)}"
    )


def _weight_bytes(checkpoint: directory.Checkpoint) -> float:
    """A checkpoint has three of the four tensors of each weight in training: all but the gradient."""
    return sum(file.bytes for file in checkpoint.manifest.files.values()) / 3


def _compare(checkpoint: directory.Checkpoint, recorded: Recorded, result: ReplayResult) -> Check:
    lineage = checkpoint.manifest.lineage
    now = Numerics(**result.numerics)
    exact = _is_repeatable(checkpoint, recorded) and same_arithmetic(lineage, now)
    if lineage.config.train.fp8:
        exact = exact and lineage.versions.torchao == versions(fp8=True)["torchao"]
    if _dropout_differs(checkpoint, exact):
        return _not_done(OTHER_DROPOUT)
    precision = "fp8" if lineage.config.train.fp8 else lineage.numerics.precision
    tolerance, bound = tolerance_for(precision, exact)
    # Up to the first step that one of both skipped the losses are of the same weights.
    skipped, last = recorded.skipped.symmetric_difference(result.skipped), max(recorded.losses)
    apart_from = min((step for step in skipped if checkpoint.step < step < last), default=last)
    equal: list[str] = []
    for step, then_loss in sorted(recorded.losses.items()):
        if step > apart_from:
            break
        loss = result.losses[step - checkpoint.step - 1]
        apart = math.inf if loss is None else abs(loss - then_loss)
        if not apart <= tolerance:  # also false for NaN
            cause = ": weights or data differ" if step == checkpoint.step + 1 else ""
            cause = cause or (": the optimizer state differs" if equal else "")
            message = (
                f"loss {loss!r} of step {step}, recorded {then_loss!r}; must be {bound}{cause}"
            )
            return Check("next loss", "fail", message)
        equal.append(f"step {step} {bound}")
    if not result.finite:
        message = "weights or optimizer state are not finite after the next update"
        return Check("next loss", "fail", message)
    if apart_from < last:
        where = "in training and not here"
        if apart_from in result.skipped:
            where = "here and not in training"
        return _not_done(
            f"the update of step {apart_from} was skipped {where}: train.spike,"
            " train.spike_factor or train.spike_window was changed"
        )
    return Check("next loss", "ok", f"replayed: {', '.join(equal)}")
