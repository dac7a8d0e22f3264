"""Replay check: load a checkpoint in fresh ranks, train a few steps, compare with the recorded losses.

The reference-batch losses prove the weights of a checkpoint. That its optimizer state, schedule and
position in the data are right shows only in the losses of the following steps.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from typing import Any

from forge.checkpoint import directory
from forge.checkpoint.manifest import Lineage, Numerics
from forge.cluster.network import available_cores, available_memory
from forge.cluster.placement import WorldLayout
from forge.core import events
from forge.core.checks import Check
from forge.core.config import ResolvedConfig, apply_overrides, checked
from forge.core.errors import DataError, Exit, TrainingError, UnfitError
from forge.core.files import write_json
from forge.core.machine import Fabric, Machine
from forge.core.paths import RunPaths, tokens_folder
from forge.core.provenance import cpu_name, versions
from forge.launch.launcher import run_ranks
from forge.launch.rank_records import RankRecord, ReplayTask
from forge.trainer import metrics

# How far a recomputed loss may be from the recorded one on another device, number of threads or in
# another arithmetic. Equal conditions must give equal bits.
TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2}
# The next recorded loss is looked for so far on: twice the default of train.log_every.
MOST_STEPS = 10
DEADLINE_SEC = 600.0
RANKS_PER_CORE = 2
# Weights, gradients and two moments in fp32, by weights; a quarter more for activations.
BYTES_OF_STATE = 4 * 1.25
NOT_RECORDED, NOT_DONE = "not recorded", "not done"
OTHER_DROPOUT = (
    "dropout is drawn in another way than it was then (device, launch, compile or torch)"
)


def same_arithmetic(lineage: Lineage, now: Numerics) -> bool:
    """Whether losses computed with the numerics `now`, here, are those of the training, bit for bit."""
    return (
        now == lineage.numerics
        and lineage.versions.torch == versions()["torch"]
        and lineage.hardware.cpu == cpu_name()
    )


# --- another number of ranks -----------------------------------------------------------------------


def load_on_two_ranks(config: ResolvedConfig, checkpoint: directory.Checkpoint) -> str:
    """Weights digest of a checkpoint as two Gloo ranks load it, each its half.

    Raises DataError where it cannot be loaded, UnfitError where the ranks cannot be run.
    """
    record = _run(config, checkpoint, 2, checkpoint.step)
    if record.status != "completed":
        kind = DataError if record.code == Exit.DATA else UnfitError
        raise kind(f"cannot be loaded by 2 ranks: {record.message}")
    assert record.weights_digest
    return record.weights_digest


def _run(
    config: ResolvedConfig, checkpoint: directory.Checkpoint, num_ranks: int, step: int
) -> RankRecord:
    """Load in fresh ranks on this host and train on to `step`; how they ended."""
    lineage = checkpoint.manifest.lineage
    shards = tokens_folder(config.data, config.ids.tokens).resolve()
    task = ReplayTask(checkpoint=str(checkpoint.folder.resolve()), shards=str(shards))
    machine = Machine(
        launcher="torchrun" if num_ranks > 1 else "single", fabric=Fabric(backend="gloo")
    )
    with tempfile.TemporaryDirectory(prefix="forge-reload-") as scratch:
        # A run's folder of its own: the checkpoint may lie anywhere, and may be read-only.
        values = apply_overrides(
            lineage.config.to_json(),
            {
                **{"run": "reload", "results": scratch, "data": config.data, "parent": None},
                "train.max_steps": step,
                "train.decay_steps": checkpoint.manifest.decay_steps,
                "train.precision": lineage.numerics.precision,
                # It takes longer than all else here; the tolerance covers its other bits.
                "train.compile": False,
                # A step that was skipped then is skipped here; the run may have been told so later.
                "train.on_nonfinite": "skip",
                "train.max_skipped_steps": MOST_STEPS,
            },
        )
        alone = checked(ResolvedConfig, values, str(checkpoint.folder))
        paths = RunPaths.of(alone)
        write_json(paths.config, alone.to_json())
        record = run_ranks(
            *(task, paths, machine, WorldLayout(1, num_ranks)), deadline_sec=DEADLINE_SEC
        )
    if record.status == "stopped":
        raise KeyboardInterrupt  # the signal came for us; nothing is known of the checkpoint
    return record


# --- the next losses -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recorded:
    """Losses that a run logged after a checkpoint, by step. `by_maker`: in the launch that made it."""

    losses: dict[int, float]
    by_maker: bool


def recorded_losses(paths: RunPaths, checkpoint: directory.Checkpoint) -> Recorded | None:
    """The losses after a checkpoint that one launch of as many ranks logged: those up to the first
    that depends on its moments (two steps on), at most MOST_STEPS on. None if there are none."""
    lines = [line for line in metrics.read(paths.metrics) if isinstance(line, metrics.TrainLine)]
    world_size = checkpoint.manifest.world_size
    launches = {
        event.launch
        for event in events.read(paths.events)
        if isinstance(event, events.Init) and event.world_size == world_size
    }
    # Steps that were done again come again; what came before the last line up to here is older
    # than this checkpoint, or the same.
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
    found = after[launch]
    last = min((step for step in found if step >= checkpoint.step + 2), default=max(found))
    losses = {step: loss for step, loss in found.items() if step <= last}
    return Recorded(losses, launch == maker)


def check_next_losses(
    config: ResolvedConfig, checkpoint: directory.Checkpoint, paths: RunPaths | None
) -> Check:
    """Train on from a checkpoint in as many fresh ranks as made it, and compare with what its run
    recorded. Where nothing was recorded, or this host cannot bear the ranks, the check says so.

    paths: of the run that it lies in; None for a lone checkpoint.
    """
    recorded = recorded_losses(paths, checkpoint) if paths else None
    if recorded is None:
        where = f"no loss of the {MOST_STEPS} steps after it" if paths else "it lies in no run"
        return Check("next loss", "ok", f"{NOT_RECORDED}: {where}")
    if _draws_otherwise(checkpoint, _is_same_course(checkpoint, recorded)):
        return Check("next loss", "warn", f"{NOT_DONE}: {OTHER_DROPOUT}")
    if reason := _too_much(checkpoint):
        return Check("next loss", "warn", f"{NOT_DONE}: {reason}")
    ranks = checkpoint.manifest.world_size
    record = _run(config, checkpoint, ranks, max(recorded.losses))
    if record.status == "completed":
        return _compare(checkpoint, recorded, record.result)
    if record.cause in (TrainingError.__name__, DataError.__name__):
        return Check("next loss", "fail", record.message)
    return Check("next loss", "warn", f"{NOT_DONE}: {ranks} ranks here: {record.message}")


def _is_same_course(checkpoint: directory.Checkpoint, recorded: Recorded) -> bool:
    """Whether training on here does what was done then. Another launch may have had another
    micro-batch; a GPU adds in any order."""
    lineage = checkpoint.manifest.lineage
    on_cpu = lineage.numerics.device == "cpu"
    return recorded.by_maker and on_cpu and not lineage.config.train.compile


def _draws_otherwise(checkpoint: directory.Checkpoint, is_same: bool) -> bool:
    """Whether dropout may take other numbers than it took then: no tolerance covers that."""
    return not is_same and checkpoint.manifest.lineage.config.model.dropout > 0


def _too_much(checkpoint: directory.Checkpoint) -> str:
    """Why this host should not train on from it; empty if it can."""
    ranks, cores = checkpoint.manifest.world_size, available_cores()
    if ranks > RANKS_PER_CORE * cores:
        return f"it was made by {ranks} ranks, here are {cores} cores"
    # What is stored are three of the four tensors that each weight has in training.
    stored = sum(file.bytes for file in checkpoint.manifest.files.values())
    replicas = ranks if checkpoint.manifest.lineage.config.train.parallel == "ddp" else 1
    needed, free = stored / 3 * BYTES_OF_STATE * replicas, available_memory()
    if needed > free:
        return f"{ranks} ranks need {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"
    return ""


def _compare(checkpoint: directory.Checkpoint, recorded: Recorded, result: dict[str, Any]) -> Check:
    """result: `losses` of the steps after the checkpoint (None: not finite), `finite`, `numerics`."""
    lineage = checkpoint.manifest.lineage
    now = Numerics(**result["numerics"])
    exact = _is_same_course(checkpoint, recorded) and same_arithmetic(lineage, now)
    if _draws_otherwise(checkpoint, exact):
        return Check("next loss", "warn", f"{NOT_DONE}: {OTHER_DROPOUT}")
    tolerance = 0.0 if exact else TOLERANCE[lineage.numerics.precision]
    bound = "equal to the last bit" if exact else f"within {tolerance:g}"
    bounds: list[str] = []
    for step, then_loss in sorted(recorded.losses.items()):
        loss = result["losses"][step - checkpoint.step - 1]
        apart = math.inf if loss is None else abs(loss - then_loss)
        if not apart <= tolerance:  # also false for NaN
            blame = ": weights or data are others" if step == checkpoint.step + 1 else ""
            blame = blame or (": the moments are others" if bounds else "")
            message = (
                f"loss {loss!r} of step {step}, recorded {then_loss!r}; must be {bound}{blame}"
            )
            return Check("next loss", "fail", message)
        bounds.append(f"step {step} {bound}")
    if not result["finite"]:
        return Check("next loss", "fail", "weights or moments are not finite after the next update")
    return Check("next loss", "ok", f"trained again: {', '.join(bounds)}")
