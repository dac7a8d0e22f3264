"""Write a merge of checkpoints, `merged/step-…` in the directory of their run, with both losses."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from forge.checkpoint import directory, storage
from forge.checkpoint.checkpoints import not_pruned
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
from forge.core.terminal import say
from forge.hosts.lock import lock
from forge.plugins.merge.weights import FORMS, merged_weights
from forge.trainer.numerics import REFERENCE_SAMPLES
from forge.trainer.optim import learning_rate
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
    weighted = [*zip(checkpoints, weights, strict=True)]
    directory.refuse_link(run.merged)
    with disk_trouble(run.merged):
        run.merged.mkdir(exist_ok=True)
    with lock(run.merged, "merge"), ExitStack() as stack:
        for checkpoint in checkpoints:
            stack.enter_context(not_pruned(checkpoint))
        parents = [
            MergedParent(step=c.step, digest=c.digest, weight=weight) for c, weight in weighted
        ]
        if target.exists():
            made = _done(target, form, parents)
            say(f"{made} is in {target}: nothing to do")
            _say_which_is_better(made, newest.step)
            return target
        _say_what_is_merged(run, weighted, form)
        for checkpoint in checkpoints:
            _refuse_corrupt(checkpoint)
        tokens = Data(newest.config({"data": data}))
        alone = _measure(newest, tokens, data).measured
        assert alone
        made = Merged(
            form=form, parents=parents, code=Code(**code()), loss=0, newest_loss=alone.loss
        )
        with atomic_directory(target) as draft:
            parts: dict[str, Any] = {"files": _write(draft, weighted), "merged": made}
            parts |= {"world_size": 1, "digest": ""}
            checks = _measure(
                Checkpoint(draft, newest.manifest.model_copy(update=parts)), tokens, data
            )
            assert checks.measured
            made = parts["merged"] = made.model_copy(update={"loss": checks.measured.loss})
            parts["reference"] = ReferenceLosses(
                samples=REFERENCE_SAMPLES, losses=[checks.reference_loss()]
            )
            newest.manifest.model_copy(update=parts).write(draft)
    say(f"{made}: {target}")
    say(f"validation loss of the merge: {checks.measured}")
    say(f"validation loss of step {newest.step}: {alone}")
    _say_which_is_better(made, newest.step)
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
    run: RunPaths, weighted: Sequence[tuple[Checkpoint, float]], form: str
) -> None:
    say(f"merging {len(weighted)} checkpoints of {run.root}: {form}, {FORMS[form]}")
    for checkpoint, weight in weighted:
        say(f"  step {checkpoint.step}: weight {weight!r}, digest {checkpoint.digest[:12]}")
    newest = weighted[-1][0]
    train, decay_steps = newest.config({}).train, newest.manifest.decay_steps
    for checkpoint, _ in weighted:
        rate = learning_rate(checkpoint.step, train, decay_steps)
        if rate != train.lr:
            say(
                f"note: the learning rate at step {checkpoint.step} was {rate:.3g}, not train.lr"
                f" {train.lr:.3g}: a merge is for the constant phase of train.schedule wsd"
            )
            break


def _refuse_corrupt(checkpoint: Checkpoint) -> None:
    checkpoint.file_list.check_sizes()
    if bad := list(checkpoint.bad_files()):
        raise DataError(
            f"checkpoint {checkpoint.folder} is corrupt: {'; '.join(bad)}",
            cause="a disk error, an interrupted copy, or an edit",
            fix="merge other checkpoints: --steps",
        )


def _write(draft: Path, weighted: Sequence[tuple[Checkpoint, float]]) -> dict[str, StoredFile]:
    """Write weights and index, durably; size and digest of each file. One tensor at a time."""
    files, tensors = storage.DigestingFiles(), dict[str, StoredTensor]()
    with files.create_stream(draft / FILE, "wb") as stream:
        for name, numbers in merged_weights(weighted):
            shape, place = [*numbers.shape], (FILE, stream.tell(), numbers.nbytes)
            tensors[name] = StoredTensor(
                "float32", shape, [StoredPart([0] * len(shape), shape, *place)]
            )
            stream.write(numbers.data.cast("B"))
    with files.create_stream(draft / INDEX, "wb") as stream:
        stream.write(index_bytes(tensors))
    return files.files


def _measure(checkpoint: Checkpoint, tokens: Data, data: str) -> ModelChecks:
    """Measure the validation loss, as `forge validate` does."""
    config = checkpoint.config({"data": data, "report.prompts": []})
    checks = ModelChecks(checkpoint, config, tokens, None)
    checks.tensors()
    if bad := checks.read_weights():
        raise DataError(f"weights in {checkpoint.folder} are not finite: {', '.join(bad[:5])}")
    checks.validation_loss()
    return checks


def _say_which_is_better(made: Merged, newest: int) -> None:
    apart = f"by {abs(made.loss - made.newest_loss):.4f} nats per token"
    if made.loss < made.newest_loss:
        say(f"better: the merge, {apart}")
    elif made.loss > made.newest_loss:
        say(f"better: step {newest}, {apart}; the merge hurts")
    else:
        say(f"better: neither, the merge and step {newest} have the same loss")
