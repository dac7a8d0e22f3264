"""Write a merge of checkpoints, `merged/step-…` in the directory of their run, with both losses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forge.checkpoint import storage
from forge.checkpoint.directory import Checkpoint
from forge.checkpoint.export_folder import atomic_directory
from forge.checkpoint.index import INDEX, StoredPart, StoredTensor, index_bytes
from forge.checkpoint.manifest import (
    Code,
    Merged,
    MergedParent,
    ReferenceLosses,
    StoredFile,
)
from forge.core.errors import ConfigError, DataError
from forge.core.files import disk_trouble
from forge.core.paths import RunPaths
from forge.core.provenance import code
from forge.core.terminal import progress, say
from forge.hosts.lock import lock
from forge.plugins.merge.weights import FORMS, merged_weights
from forge.trainer.numerics import REFERENCE_SAMPLES
from forge.trainer.optim import learning_rate
from forge.trainer.saved_model import not_pruned
from forge.trainer.validation_loss import Measured
from forge.validation.model_checks import ModelChecks
from forge.validation.run_data import Data

FILE = "__0_0.distcp"  # as of a checkpoint that one rank has written


def merge(
    run: RunPaths,
    checkpoints: Sequence[Checkpoint],
    form: Any,
    weights: Sequence[float],
    data: str,
) -> Path:
    """Merge checkpoints of a run, oldest first, and say whether the merge is better than the newest; the
    directory of the merge. form, weights: as in `Merged`. data: the directory with the run's tokens.

    Raises ConfigError where another merge has this name, DataError for a corrupt checkpoint, tokens that
    are not there, and a merge that is not finite; UnfitError for a disk that is full.
    """
    newest = checkpoints[-1]
    target = run.merged / newest.folder.name
    parents = [
        MergedParent(step=one.step, digest=one.digest, weight=weight)
        for one, weight in zip(checkpoints, weights, strict=True)
    ]
    with disk_trouble(run.merged):
        run.merged.mkdir(exist_ok=True)
    with lock(run.merged, "merge"):
        if target.exists():
            done = _done(target, form, parents)
            say(f"{done} is in {target}: nothing to do")
            _compare(done, newest.step)
            return target
        _say_what_is_merged(run, checkpoints, form, weights)
        for checkpoint in checkpoints:
            with not_pruned(checkpoint):
                _refuse_corrupt(checkpoint)
        tokens = Data(newest.config({"data": data}))
        alone, _ = _losses(newest, tokens, data)
        with atomic_directory(target) as draft:
            files = _write(draft, [*zip(checkpoints, weights, strict=True)])
            made = Merged(
                form=form, parents=parents, code=Code(**code()), loss=0.0, newest_loss=alone.loss
            )
            changes: dict[str, Any] = {
                "world_size": 1,
                "files": files,
                "merged": made,
                "digest": "",
            }
            checkpoint = Checkpoint(draft, newest.manifest.model_copy(update=changes))
            measured, reference = _losses(checkpoint, tokens, data)
            made = made.model_copy(update={"loss": measured.loss})
            changes |= {
                "merged": made,
                "reference": ReferenceLosses(samples=REFERENCE_SAMPLES, losses=[reference]),
            }
            newest.manifest.model_copy(update=changes).write(draft)
    say(f"{made}: {target}")
    say(f"validation loss of the merge: {measured}")
    say(f"validation loss of step {newest.step}: {alone}")
    _compare(made, newest.step)
    return target


def _done(target: Path, form: str, parents: Sequence[MergedParent]) -> Merged:
    """The record of this merge, where that is what the directory has. Raises ConfigError, DataError."""
    there = Checkpoint.open_complete(target).manifest.merged
    if there is None or (there.form, there.parents) != (form, [*parents]):
        raise ConfigError(
            f"{target} is {there or 'no merge'}, of other weights or checkpoints than you name",
            cause="a merge has the name of its newest step, and runs may have started from it",
            fix=f"keep it, or remove it and rerun the command: rm -r {target}",
        )
    return there


def _say_what_is_merged(
    run: RunPaths, checkpoints: Sequence[Checkpoint], form: str, weights: Sequence[float]
) -> None:
    say(f"merging {len(checkpoints)} checkpoints of {run.root}: {form}, {FORMS[form]}")
    for checkpoint, weight in zip(checkpoints, weights, strict=True):
        say(f"  step {checkpoint.step}: weight {weight!r}, digest {checkpoint.digest[:12]}")
    train, decay_steps = checkpoints[-1].config({}).train, checkpoints[-1].manifest.decay_steps
    rates = {one.step: learning_rate(one.step, train, decay_steps) for one in checkpoints}
    if moved := [step for step, rate in rates.items() if rate != train.lr]:
        say(
            f"note: step {moved[0]} was trained at the learning rate {rates[moved[0]]:.3g}, not at"
            f" train.lr {train.lr:.3g}: a merge is for the constant phase of train.schedule wsd"
        )


def _refuse_corrupt(checkpoint: Checkpoint) -> None:
    checkpoint.file_list.check_sizes()
    if bad := list(checkpoint.bad_files()):
        raise DataError(
            f"checkpoint {checkpoint.folder} is corrupt: {'; '.join(bad)}",
            cause="a disk error, an interrupted copy, or an edit",
            fix="merge other checkpoints: --steps",
        )


def _write(draft: Path, parents: Sequence[tuple[Checkpoint, float]]) -> dict[str, StoredFile]:
    """Write weights and index, durably; size and digest of each file. One tensor at a time."""
    files, tensors, done = storage.DigestingFiles(), dict[str, StoredTensor](), 0
    with (
        progress("merge", 1, "files") as update,
        files.create_stream(draft / FILE, "wb") as stream,
    ):
        for name, numbers in merged_weights(parents):
            part = StoredPart(
                [0] * numbers.ndim, [*numbers.shape], FILE, stream.tell(), numbers.nbytes
            )
            stream.write(numbers.data.cast("B"))
            tensors[name] = StoredTensor("float32", [*numbers.shape], [part])
            done += numbers.size
            update(0, f"{done / 1e6:,.1f}M weights")
    with files.create_stream(draft / INDEX, "wb") as stream:
        stream.write(index_bytes(tensors))
    return files.files


def _losses(checkpoint: Checkpoint, tokens: Data, data: str) -> tuple[Measured, float]:
    """The validation loss, as `forge validate` measures it, and the loss on the first reference batch."""
    config = checkpoint.config({"data": data, "report.prompts": []})
    checks = ModelChecks(checkpoint, config, tokens, None)
    checks.tensors()
    if bad := checks.read_weights():
        raise DataError(f"weights in {checkpoint.folder} are not finite: {', '.join(bad[:5])}")
    checks.validation_loss()
    assert checks.measured
    return checks.measured, checks.reference_loss()


def _compare(made: Merged, newest: int) -> None:
    """Name the better one."""
    if made.loss < made.newest_loss:
        better = f"the merge is better than step {newest} by {made.newest_loss - made.loss:.4f}"
    elif made.loss > made.newest_loss:
        better = f"step {newest} is better than the merge by {made.loss - made.newest_loss:.4f}"
    else:
        better = f"the merge and step {newest} are equally good"
    say(f"{better} nats per token ({made.loss:.4f} and {made.newest_loss:.4f})")
