"""Records of evaluation. The scores themselves are records of the kernel, which others show and state."""

from __future__ import annotations

from pydantic import Field

from forge.core.records import Evaluation, Record
from forge.plugins.evaluation.settings import Evaluate


class SubmittedJob(Record):
    """evaluations/step-….job.json: the job that was submitted to evaluate this checkpoint."""

    job: str
    """Empty until sbatch has answered."""


class EvaluationData(Record):
    """evaluations/data.json: the data of these tasks is in the cache of `datasets`."""

    harness: str
    """Version of lm-eval."""
    task_files: str
    """Digest of the files in evaluate.include_path; empty without them."""
    documents: dict[str, int]
    """Task -> number of documents."""
    tasks: list[str] = Field(default=[])
    """As evaluate.tasks names them; [] in records of earlier versions."""
    include_path: str | None = None


class Evaluations(Record):
    """evaluation.json: the scores of the last checkpoint, and of every k-th one (evaluate.every)."""

    run: str
    step: int
    """Step of the last checkpoint."""
    evaluate: Evaluate
    evaluations: list[Evaluation]
    """Evaluations in the order of steps; the last is of `step`."""
