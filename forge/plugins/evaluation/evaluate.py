"""`forge evaluate`: score checkpoints of a run by tasks of the lm-evaluation-harness, each once."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.checkpoint import directory, export_folder, manifest, resume
from forge.core.errors import ConfigError, DataError
from forge.core.files import digest_file
from forge.core.paths import RunPaths, checkpoint_step
from forge.core.records import Evaluated, Evaluation, Score
from forge.core.terminal import duration, say
from forge.core.values import shown
from forge.hosts.lock import LockHeld, lock
from forge.plugins.evaluation import harness, tasks
from forge.plugins.evaluation.contamination import ItemValues, item_values
from forge.plugins.evaluation.records import Evaluations
from forge.plugins.evaluation.settings import Evaluate
from forge.plugins.evaluation.tasks import task_digest
from forge.slurm import slurm
from forge.trainer import numerics
from forge.trainer.export import export

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

POLL_SEC = 10.0
PACKAGES = ("torch", "transformers", "datasets")


def evaluate_run(paths: RunPaths, evaluate: Evaluate, data: str, *, is_ours: bool = True) -> None:
    """Score the last checkpoint of a run and each one that evaluate.every names, where that was not done
    yet, and write evaluation.json. data: the directory with its tokenizer. is_ours: whether an export of
    the run may be used.

    Raises ConfigError (unknown tasks), DataError (no checkpoint, or a corrupt one) and
    UnfitError (data of a task is not cached, disk full, someone else evaluates).
    """
    last = resume.required(paths)
    chosen = {last.step: last}
    for folder in directory.committed(paths.checkpoints) if evaluate.every else ():
        step = checkpoint_step(folder.name)
        if step and evaluate.every and step % evaluate.every == 0:
            chosen[step] = directory.Checkpoint.open(folder)
    evaluator = _Evaluator(paths, evaluate, data, is_ours)
    evaluations = [evaluator.evaluation(chosen[step]) for step in sorted(chosen)]
    run = paths.root.resolve().name
    record = Evaluations(run=run, step=last.step, evaluate=evaluate, evaluations=evaluations)
    record.write(paths.evaluation)


def evaluate_checkpoint(
    folder: Path, evaluate: Evaluate, data: str, *, is_ours: bool = True
) -> None:
    """Score one checkpoint of a run. Raises as `evaluate_run`."""
    paths = RunPaths(folder.parent.parent)
    _Evaluator(paths, evaluate, data, is_ours).evaluation(resume.named(folder))


def refuse_no_tasks(paths: RunPaths, evaluate: Evaluate) -> None:
    """ConfigError where there is nothing to evaluate a run with."""
    if not evaluate.tasks:
        raise ConfigError(
            f"no tasks to evaluate {paths.root} with: evaluate.tasks is []",
            fix="set it in config/config.yaml, or --evaluate.tasks=[hellaswag,arc_easy]",
        )


@dataclass(frozen=True)
class _Evaluator:
    """Scores checkpoints of one run. data: the directory with its tokenizer. is_ours: whether an export
    that is there may be used."""

    paths: RunPaths
    evaluate: Evaluate
    data: str
    is_ours: bool

    @cached_property
    def loaded(self) -> tuple[TaskManager, dict[str, Any]]:
        """The tasks, once it is known that each has its data: before a model is exported."""
        index = tasks.find_tasks(self.evaluate)
        return index, tasks.load(index, self.evaluate, self.paths)

    def evaluation(self, checkpoint: directory.Checkpoint) -> Evaluation:
        """The evaluation of this checkpoint, made now where there is none."""
        identity = _identity(checkpoint, self.evaluate)
        with _held(self.paths, checkpoint):
            done = _done(self.paths, checkpoint, identity)
            if done and not self._lacks_items(checkpoint, identity):
                say(f"evaluation of step {checkpoint.step}: nothing to do")
                return done
            return self._evaluate(checkpoint, identity)

    def _lacks_items(self, checkpoint: directory.Checkpoint, identity: Evaluated) -> bool:
        """Return whether values by item are asked for and not there, as beside scores of before."""
        if self.evaluate.contamination is None:
            return False
        there = ItemValues.read_if_there(self._items(checkpoint))
        return there is None or there.of != identity

    def _items(self, checkpoint: directory.Checkpoint) -> Path:
        return ItemValues.path(self.paths.evaluation_of(checkpoint.folder))

    def _evaluate(self, checkpoint: directory.Checkpoint, identity: Evaluated) -> Evaluation:
        (index, loaded), began = self.loaded, time.monotonic()
        train = checkpoint.manifest.lineage.config.to_json()["train"]
        precision = numerics.precision(train["precision"], harness.device())
        with self._exported(checkpoint) as folder:
            scores, samples, device = harness.score(
                folder, self.evaluate, index, precision, identity.seq_len
            )
        for further in (".items.json", ".contamination.json"):  # of other scores
            self.paths.evaluation_of(checkpoint.folder).with_suffix(further).unlink(missing_ok=True)
        if self.evaluate.contamination is not None:
            item_values(samples, loaded, identity).write(self._items(checkpoint))
        record = Evaluation(
            step=checkpoint.step,
            of=identity,
            scores=scores,
            device=device,
            precision=precision,
            seconds=round(time.monotonic() - began, 1),
            versions={name: version(name) for name in PACKAGES},
        )
        record.write(self.paths.evaluation_of(checkpoint.folder))
        say(f"step {checkpoint.step} in {duration(record.seconds)}: {in_short(scores)}")
        return record

    @contextmanager
    def _exported(self, checkpoint: directory.Checkpoint) -> Iterator[Path]:
        """A directory with the exported checkpoint: that of `forge export`, else one for as long as it is
        used. Leftovers of a killed evaluation are removed."""
        # As the lock is: of a merge another than of the checkpoint of its step.
        name = self.paths.name_of(checkpoint.folder)
        existing = self.paths.exports / name
        if self.is_ours and _is_export_of(existing, checkpoint):
            yield existing
            return
        temporary = self.paths.evaluations / f".export-{name}"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            yield export(checkpoint.folder, temporary, "fp32", {"data": self.data})
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _identity(checkpoint: directory.Checkpoint, evaluate: Evaluate) -> Evaluated:
    return Evaluated(
        checkpoint_digest=digest_file(checkpoint.folder / manifest.MANIFEST),
        tasks=sorted(evaluate.tasks),
        task_files=task_digest(evaluate),
        num_fewshot=evaluate.num_fewshot,
        limit=evaluate.limit,
        harness=tasks.harness_version(),
        seq_len=checkpoint.manifest.lineage.config.to_json()["train"]["seq_len"],
    )


def _done(
    paths: RunPaths, checkpoint: directory.Checkpoint, identity: Evaluated
) -> Evaluation | None:
    """The evaluation that was made of exactly this; None where it is due."""
    try:
        recorded = Evaluation.read_if_there(paths.evaluation_of(checkpoint.folder))
    except DataError as err:
        say(f"{err.what}: evaluating again")
        return None
    if recorded is None or recorded.of == identity:
        return recorded
    now = identity.model_dump()
    changed = [
        f"{key} {shown(value)}, now {shown(now[key])}"
        for key, value in recorded.of.model_dump().items()
        if value != now[key]
    ]
    say(
        f"evaluation of step {checkpoint.step}: replaces the scores of before ({'; '.join(changed)})"
    )
    return None


@contextmanager
def _held(paths: RunPaths, checkpoint: directory.Checkpoint) -> Iterator[None]:
    """Hold the right to evaluate this checkpoint. A job waits for a living holder, and for Slurm;
    elsewhere UnfitError names the holder. Nobody waits where it is not known whether the holder lives, or
    for a disk that cannot be written: UnfitError."""
    name = f".{paths.evaluation_of(checkpoint.folder).stem}.lock"
    paths.evaluations.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        while True:
            try:
                held.enter_context(lock(paths.evaluations, "evaluate", name=name))
                break
            except (LockHeld, slurm.SlurmSilent) as err:
                if slurm.this_job_id() is None:
                    raise
                say(f"waiting: {err.what}")
                time.sleep(POLL_SEC)
        yield


def in_short(scores: list[Score]) -> str:
    """`colors acc 0.75 ± 0.11, …`."""
    return ", ".join(
        f"{s.task} {s.metric} {'not finite' if s.value is None else f'{s.value:.4g}'}"
        + (f" ± {s.stderr:.2g}" if s.stderr else "")
        for s in scores
    )


def _is_export_of(folder: Path, checkpoint: directory.Checkpoint) -> bool:
    digest = digest_file(checkpoint.folder / manifest.MANIFEST)
    try:
        return export_folder.is_exported(folder, {"checkpoint_digest": digest, "dtype": "fp32"})
    except ConfigError:
        return False  # in bf16, or of another training
