"""Rows for people: the scores of a run by task and metric, its sources and text in words and numbers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from forge.checkpoint.manifest import Manifest, RecordedMix
from forge.core.config import Ids
from forge.core.errors import DataError
from forge.core.files import canonical, digest_bytes
from forge.core.mix import MixStage, stage_at, stages
from forge.core.paths import MANIFEST, RunPaths, checkpoint_step, tokens_folder
from forge.core.records import Evaluation, Score
from forge.data.shards import ShardManifest
from forge.data.statistics import read_statistics
from forge.reporting.run_files import RunFiles
from forge.reporting.run_state import data_folder, ids_of

# Keys of `train` on which a validation loss depends, besides the text; `mix` weighs its sources.
MEASURED_BY = ("seq_len", "eval_samples", "document_mask", "mix")
OF_SHARDS = ("shard_tokens", "part_mib", "seq_len")


@dataclass(frozen=True)
class SourceRow:
    """A source. tokens: of its training split. samples: drawn by the run and its parents."""

    name: str
    tokens: int
    weight: str
    samples: int
    epochs: float

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.tokens:,} tokens, {self.weight}, {self.samples:,} samples drawn"
            f" = {self.epochs:.2f} epochs"
        )


def source_rows(manifest: Manifest | None) -> list[SourceRow]:
    """One row for each source, sorted by name; none for a run without sources."""
    if manifest is None or manifest.mix is None:
        return []
    mix = manifest.mix
    return [
        SourceRow(name, use.tokens, _weight(mix, name), use.samples, use.samples / use.windows)
        for name, use in sorted(mix.sources.items())
    ]


def _weight(mix: RecordedMix, name: str) -> str:
    """`70 %, 30 % from step 8000`; a stage that leaves the share as it was is passed over."""
    shares = [
        (stage.step, MixStage(stage.step, stage.weights).shares.get(name, 0))
        for stage in mix.stages
    ]
    changes = [
        f"{100 * float(after):.3g} % from step {step}"
        for (_, before), (step, after) in pairwise(shares)
        if after != before
    ]
    first = f"{100 * float(shares[0][1]):.3g} %"
    return ", ".join([first, *changes])


def text_lines(data: Path, ids: Ids) -> list[str]:
    """Lines on the text of a run's tokens, by source, from their statistics; [] of tokens without any.
    Raises DataError where these are corrupt."""
    tokens = ids.sources or {"": ids.tokens}
    statistics = {
        name: read_statistics(tokens_folder(data, one)) for name, one in tokens.items() if one
    }
    return [
        f"{name}: {line}" if name else line
        for name, found in statistics.items()
        for line in (found.lines if found else ())
    ]


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
        """`words acc (0-shot, 1,000 documents)`: scores of equal labels can be compared where
        they are of the same questions (Score.version, Score.data_digest)."""
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
        evaluations = _evaluations(paths)
    except DataError:
        return []
    rows: dict[tuple[str, str], dict[int, Score]] = {}
    for evaluation in evaluations:
        if _settings(evaluation) == _settings(evaluations[-1]):
            for score in evaluation.scores:
                rows.setdefault((score.task, score.metric), {})[evaluation.step] = score
    return [ScoreRow(task, metric, by_step) for (task, metric), by_step in sorted(rows.items())]


def _evaluations(paths: RunPaths) -> list[Evaluation]:
    """The scores of all evaluated checkpoints, by step. Raises DataError where a file is corrupt."""
    files = paths.evaluations.glob("step-*.json") if paths.evaluations.is_dir() else ()
    records = [path for path in files if checkpoint_step(path.stem) is not None]
    return sorted(map(Evaluation.read, records), key=lambda evaluation: evaluation.step)


def _settings(evaluation: Evaluation) -> dict[str, object]:
    """Settings that must be equal for the scores of two checkpoints to be compared."""
    return evaluation.of.model_dump(exclude={"checkpoint_digest"})


def validation_text(paths: RunPaths) -> str:
    """Digest of the files of a run's text, and of the keys that select its validation documents; "" where
    its tokens are not here."""
    files = RunFiles(paths)
    data, ids = data_folder(files), ids_of(files.config)
    of_source = ids.sources or {"": ids.tokens}
    try:
        tokens = {
            name: ShardManifest.read_if_there(tokens_folder(data, one) / MANIFEST)
            for name, one in of_source.items()
            if data and one
        }
    except DataError:
        return ""
    known = {name: one for name, one in tokens.items() if one}
    if len(known) < len(of_source):
        return ""
    text = {
        name: [sorted(entry.digest for entry in one.inputs), _without_sizes(one.settings)]
        for name, one in known.items()
    }
    return digest_bytes(canonical(text))


def measured_by(files: RunFiles, step: int) -> dict[str, object]:
    """The values of MEASURED_BY of a run after `step` steps; of the mix the shares in the last step."""
    train = files.config.get("train", {})
    found = {key: train.get(key) for key in MEASURED_BY}
    if mix := found["mix"]:
        shares = stage_at(stages(mix), max(step - 1, 0)).shares
        found["mix"] = {name: round(float(share), 6) for name, share in shares.items() if share}
    return found


def _without_sizes(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of a token set on which its documents depend."""
    return {key: value for key, value in settings.items() if key not in OF_SHARDS}
