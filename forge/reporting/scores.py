"""Scores of a run's checkpoints as people read them: a row for each task and metric."""

from __future__ import annotations

from dataclasses import dataclass

from forge.core.errors import DataError
from forge.core.paths import RunPaths
from forge.core.records import Evaluation, Score
from forge.evaluation.settings import read_evaluations


@dataclass(frozen=True)
class ScoreRow:
    """One metric of one task over the steps that were evaluated alike."""

    task: str
    metric: str
    by_step: dict[int, Score]

    @property
    def last(self) -> Score:
        """The score at the last step."""
        return self.by_step[max(self.by_step)]

    @property
    def label(self) -> str:
        """`words acc (0-shot, 1,000 documents)`: scores of equal labels can be compared."""
        shots = "" if self.last.num_fewshot is None else f"{self.last.num_fewshot}-shot, "
        return f"{self.task} {self.metric} ({shots}{self.last.num_documents:,} documents)"

    def text(self, step: int | None = None) -> str:
        """The score at this step, by default at the last, as `0.7500 ± 0.1100`; empty without a score."""
        score = self.last if step is None else self.by_step.get(step)
        if score is None:
            return ""
        value = "not finite" if score.value is None else f"{score.value:.4f}"
        return value + (f" ± {score.stderr:.4f}" if score.stderr else "")


def read_scores(paths: RunPaths) -> list[ScoreRow]:
    """The scores of a run, of all steps that were evaluated as the last one was; [] without any. A
    record that cannot be read counts as none: a page for people must not fail because of it."""
    try:
        evaluations = read_evaluations(paths)
    except DataError:
        return []
    rows: dict[tuple[str, str], dict[int, Score]] = {}
    for evaluation in evaluations:
        if _settings(evaluation) == _settings(evaluations[-1]):
            for score in evaluation.scores:
                rows.setdefault((score.task, score.metric), {})[evaluation.step] = score
    return [ScoreRow(task, metric, by_step) for (task, metric), by_step in sorted(rows.items())]


def _settings(evaluation: Evaluation) -> dict[str, object]:
    """Settings that must be equal for the scores of two checkpoints to be compared."""
    return evaluation.of.model_dump(exclude={"checkpoint_digest"})
