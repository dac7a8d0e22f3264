"""`evaluate.contamination`: the statement of the items that the training text holds, and of the scores
without them, made for a run and made again by whoever has the texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from math import isclose
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, ClassVar, Literal, NamedTuple, Self, get_args

import forge
from forge.attestation import verify
from forge.attestation.verify import VerificationError
from forge.checkpoint import resume
from forge.core.config import Config
from forge.core.errors import ConfigError, DataError
from forge.core.files import MAX_JSON_BYTES, canonical, digest_bytes, digest_file, write_json
from forge.core.paths import MANIFEST, RunPaths, checkpoint_name, tokens_folder
from forge.core.records import Evaluated, Record, RecordPart, validated
from forge.core.terminal import say
from forge.core.text_formats import TOKEN_FORMATS
from forge.data.content_ids import resolve, single_corpora, tokens_settings
from forge.data.inputs import corpus_files, files_by_digest
from forge.data.shards import ShardManifest
from forge.plugins.evaluation import tasks
from forge.plugins.evaluation.contamination import (
    ItemFound,
    ItemValues,
    TaskValues,
    TextsOfSource,
    Verdict,
    items_of,
    search,
)
from forge.plugins.evaluation.records import Evaluations
from forge.plugins.evaluation.sequences import THRESHOLDS
from forge.plugins.evaluation.settings import Evaluate

CONTAMINATION = "urn:forge:contamination:v1"
NAME = (
    "contamination.json"  # of what the text holds; behind step-…, of the statement on a checkpoint
)
CLEAN: tuple[Verdict, ...] = ("clean", "question only")  # of items that clean scores are made of


class Contamination(Record):
    """evaluations/contamination.json: what the text of a run holds of each item of each task."""

    MAX_BYTES: ClassVar[int] = MAX_JSON_BYTES

    of: dict[str, Any]
    """Digests of texts and tasks, and settings: where they are equal nothing is searched again."""
    tasks: dict[str, list[ItemFound]]


class CleanScore(RecordPart):
    """A metric that is the mean over items: on all of them, and on clean ones (None without any)."""

    task: str
    metric: str
    all: float
    clean: float | None
    stderr: float | None
    num_clean: int


class ContaminationPredicate(RecordPart):
    """The predicate of evaluations/step-….contamination.json, an in-toto statement on a checkpoint."""

    format: Literal[1] = 1
    forge: str = forge.__version__
    evaluated: Evaluated
    share: float
    """Value of evaluate.contamination."""
    thresholds: dict[str, int] = THRESHOLDS
    texts: dict[str, TextsOfSource]
    """Texts by source, "" for those of tokenize.inputs."""
    items: dict[str, str]
    """Task -> blake3 of the digests of its items."""
    counts: dict[str, dict[Verdict, int]]
    """Task -> number of its items of each verdict."""
    found: str
    """blake3 of `tasks` in contamination.json."""
    values: str
    """blake3 of `tasks` in step-….items.json."""
    scores: list[CleanScore]
    sha256: str = ""
    """Of the canonical JSON of the statement without this key."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises DataError where it is no such statement, or was edited."""
        try:
            data = verify.read_bytes(path, MAX_JSON_BYTES)
            statement = verify.read_predicate(data, path.name, CONTAMINATION)
        except VerificationError as err:
            raise DataError(f"{path}: {err}") from None
        return validated(cls, statement["predicate"], path)

    @property
    def lines(self) -> list[str]:
        """Lines of `forge evaluate` and `forge show`: the counts of each task, then each score."""
        told = [f"{task}: {_counted(counts)}" for task, counts in self.counts.items()]
        for one in self.scores:
            clean = "none" if one.clean is None else f"{one.clean:.4f}"
            error = f" ± {one.stderr:.4f}" if one.stderr else ""
            told.append(
                f"{one.task} {one.metric}: {one.all:.4f} on all items, {clean}{error} on"
                f" {one.num_clean:,} clean ones"
            )
        return told


def _counted(counts: Mapping[Verdict, int]) -> str:
    of_verdicts = ", ".join(f"{counts.get(v, 0):,} {v}" for v in get_args(Verdict))
    return f"of {sum(counts.values()):,} items {of_verdicts}"


class Searched(NamedTuple):
    """The texts of a run, and what they hold."""

    texts: dict[str, TextsOfSource]
    share: float
    found: dict[str, list[ItemFound]]

    def predicate(
        self,
        evaluated: Evaluated,
        values: Mapping[str, TaskValues],
        scores: list[tuple[str, str, float | None]],
    ) -> ContaminationPredicate:
        """scores: task, metric and value of each, of all items."""
        clean = {t: {i.item for i in of if i.verdict in CLEAN} for t, of in self.found.items()}
        return ContaminationPredicate(
            evaluated=evaluated,
            share=self.share,
            texts=self.texts,
            items={task: _digest([one.item for one in of]) for task, of in self.found.items()},
            counts={t: dict(Counter(one.verdict for one in of)) for t, of in self.found.items()},
            found=_digest({t: [one.model_dump() for one in of] for t, of in self.found.items()}),
            values=_digest({task: one.model_dump() for task, one in values.items()}),
            scores=[*_clean_scores(scores, values, clean)],
        )


def _digest(value: Any) -> str:
    return digest_bytes(canonical(value))


def _clean_scores(
    scores: list[tuple[str, str, float | None]],
    values: Mapping[str, TaskValues],
    clean: Mapping[str, set[str]],
) -> Iterator[CleanScore]:
    """Scores without the items that the text holds with their answers, and without those that are not
    checkable, of each metric whose score on all items is the mean over them."""
    for task, metric, score in scores:
        numbers = values[task].metrics.get(metric) if task in values else None
        if not numbers or score is None or not isclose(fmean(numbers), score, rel_tol=1e-6):
            continue
        of_items = zip(values[task].items, numbers, strict=False)
        kept = [number for item, number in of_items if item in clean.get(task, ())]
        yield CleanScore(
            task=task,
            metric=metric,
            all=score,
            clean=fmean(kept) if kept else None,
            stderr=stdev(kept) / len(kept) ** 0.5 if len(kept) > 1 else None,
            num_clean=len(kept),
        )


# --- of a run ---------------------------------------------------------------------------------------


def search_run(paths: RunPaths, config: Config, share: float, *, is_ours: bool) -> Searched:
    """Search the text that a run was trained on for its tasks, once: where nothing has changed, the
    record of before is taken.

    is_ours: whether the config, which names the texts, is the user's. Raises ConfigError where it is not,
    DataError where it names other texts, or none, and as `contamination.search`.
    """
    evaluate = config.of(Evaluate)
    if not is_ours:
        raise ConfigError(
            f"evaluate.contamination is set, and your config has no run {paths.root.name}",
            cause="which text files are read is not taken from a directory of results",
            fix="--config FILE, or leave the key out",
        )
    resolved, lineage = resolve(config), resume.required(paths).manifest.lineage
    tokens, texts = lineage.sources or {"": lineage.tokens}, dict[str, TextsOfSource]()
    if gone := tokens.keys() - config.tokenize.corpora.keys() - {""}:
        raise DataError(
            f"your config has no source {min(gone)}, which {paths.root.name} was trained on",
            cause="tokenize.sources was changed",
            fix="restore it, or name the config of the run: --config FILE; without evaluate.contamination"
            " no text is needed",
        )
    corpora = dict(zip(resolved.ids.sources or [""], single_corpora(resolved), strict=True))
    for name, one in corpora.items():
        path = tokens_folder(one.data, one.ids.tokens) / MANIFEST
        digest = digest_file(path) if path.is_file() else ""
        if (
            name not in tokens
            or digest != tokens[name].digest
            or one.tokenize.format in TOKEN_FORMATS
        ):
            raise DataError(
                f"{path} does not list the text that {name or 'the run'} was trained on",
                cause="tokenize.* was changed, the tokens were removed or made again, or made of ids",
                fix="restore them; without evaluate.contamination no text is needed",
            )
        settings, files = tokens_settings(one.tokenize), ShardManifest.read(path).inputs
        packed = one.tokenize.is_packed
        texts[name] = TextsOfSource(tokens=digest, settings=settings, files=files, is_plain=packed)
    of: dict[str, Any] = {
        "texts": {name: one.tokens for name, one in texts.items()},
        "share": share,
        "tasks": sorted(evaluate.tasks),
        "task_files": tasks.task_digest(evaluate),
        "limit": evaluate.limit,
        "harness": tasks.harness_version(),
    }
    if plain := [name for name, one in texts.items() if one.is_plain]:
        of["plain"] = plain
    there = Contamination.read_if_there(paths.evaluations / NAME)
    if there is None or there.of != of:
        places = {n: {f.name: f.location for f in corpus_files(one)} for n, one in corpora.items()}
        loaded = tasks.load(tasks.find_tasks(evaluate), evaluate, paths)
        found = search(items_of(loaded, evaluate.limit), share, texts, places)
        there = Contamination(of=of, tasks=found)
        there.write(paths.evaluations / NAME)
    return Searched(texts, share, there.tasks)


def write_statements(paths: RunPaths, searched: Searched) -> None:
    """Write the statement on each evaluated checkpoint of a run, and say what is in it."""
    for evaluation in Evaluations.read(paths.evaluation).evaluations:
        name = checkpoint_name(evaluation.step)
        values = ItemValues.read(ItemValues.path(paths.evaluations / f"{name}.json")).tasks
        scores = [(score.task, score.metric, score.value) for score in evaluation.scores]
        predicate = searched.predicate(evaluation.of, values, scores)
        content = predicate.model_dump(mode="json")
        subject = f"{paths.root.resolve().name}/checkpoints/{name}"
        statement = {
            "_type": verify.IN_TOTO,
            "predicateType": CONTAMINATION,
            "subject": [{"name": subject, "digest": {"blake3": evaluation.of.checkpoint_digest}}],
            "predicate": content,
        }
        content["sha256"] = verify.statement_digest(statement)
        write_json(paths.evaluations / f"{name}.{NAME}", statement)
        say("\n".join([f"step {evaluation.step}:", *predicate.lines]))


# --- made again -------------------------------------------------------------------------------------


def verify_statement(path: Path, texts: str, loaded: Mapping[str, Any]) -> None:
    """Search the texts of a statement again, and say what is as it states.

    texts: directory with the files that it lists, under whatever names, or `python:stdlib`. loaded: the
    tasks that the user names, since they are code. Raises DataError that names what differs.
    """
    stated = ContaminationPredicate.read(path)
    try:
        made, values = _made_again(path, stated, texts, loaded)
        for key in ("thresholds", "items", "counts", "found", "values", "scores"):
            here, there = (one.model_dump()[key] for one in (made, stated))
            if here != there:
                raise VerificationError(
                    f"{key} {here!r:.300} here, {there!r:.300} in the statement"
                )
    except VerificationError as err:
        raise DataError(f"{path}: {err}") from None
    files = sum(len(one.files) for one in stated.texts.values())
    print(f"  ok    texts: {files:,} files, as the statement says")
    for task, counts in made.counts.items():
        print(f"  ok    {task}: {_counted(counts)}")
    if values.exists():
        print(f"  ok    scores: {len(made.scores)} without contaminated items, by {values.name}")
    else:
        print(f"  note  scores: NOT verified, since there is no {values.name} beside it")
    digest = verify.printable(stated.evaluated.checkpoint_digest[:64])
    print(f"checkpoint {digest}: statement {stated.sha256}")


def _made_again(
    path: Path, stated: ContaminationPredicate, texts: str, loaded: Mapping[str, Any]
) -> tuple[ContaminationPredicate, Path]:
    """The predicate by these texts and tasks, and the path that the values by item have beside it."""
    listed = [entry for one in stated.texts.values() for entry in one.files]
    found = files_by_digest(texts, "--texts", [(e.name, e.size, e.digest) for e in listed])
    places = {
        source: {entry.name: found[entry.digest].location for entry in one.files}
        for source, one in stated.texts.items()
    }
    items = items_of(loaded, stated.evaluated.limit)
    again = Searched(stated.texts, stated.share, search(items, stated.share, stated.texts, places))
    beside = ItemValues.path(path.with_name(f"{path.name.removesuffix(NAME)}json"))
    values = ItemValues.read_if_there(beside)
    scores = [(score.task, score.metric, score.all) for score in stated.scores]
    made = again.predicate(stated.evaluated, values.tasks if values else {}, [*scores])
    unseen = {} if values else {"values": stated.values, "scores": stated.scores}
    return made.model_copy(update=unseen), beside
