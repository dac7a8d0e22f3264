"""Items of tasks in the training text: one pass over it by worker processes, and a verdict on each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import isfinite
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from blake3 import blake3

from forge.core.config import checked
from forge.core.errors import DataError
from forge.core.files import MAX_JSON_BYTES, grouped
from forge.core.records import Evaluated, Record, RecordPart
from forge.core.tokenize_settings import Tokenize
from forge.data import corpus
from forge.data.corpus import InputFile
from forge.data.input_bytes import Consumed
from forge.data.packing import plain_text
from forge.data.part_workers import made_by_workers
from forge.data.shards import InputEntry
from forge.data.tokenize import split_of
from forge.hosts.network import available_cores
from forge.plugins.evaluation.sequences import Item, Sequences

MOST_FILES = 3  # that are told of an item
PART_BYTES = 2**26


# --- items ------------------------------------------------------------------------------------------


class TaskValues(RecordPart):
    """Values of the items of a task, by digest and by metric as `Score` names it, in the same order."""

    items: list[str]
    metrics: dict[str, list[float]]


class ItemValues(Record):
    """evaluations/step-….items.json: what the scores of one checkpoint are means of."""

    MAX_BYTES: ClassVar[int] = MAX_JSON_BYTES

    of: Evaluated
    tasks: dict[str, TaskValues]

    @staticmethod
    def path(evaluation: Path) -> Path:
        """Return the path of the record beside the one of the scores."""
        return evaluation.with_suffix(".items.json")


def item_of(task: Any, document: Any) -> Item:
    """The question of a task of the harness, without examples before it, and its first right answer."""
    question, answer = task.doc_to_text(document), task.doc_to_target(document)
    first = answer[0] if isinstance(answer, list) and answer else answer
    if getattr(task, "multiple_input", 0):  # the choices are questions, with one answer
        question = task.doc_to_choice(document)[int(question)]
    elif isinstance(first, int) and task.OUTPUT_TYPE == "multiple_choice":
        first = task.doc_to_choice(document)[first]
    return Item(str(question or ""), "" if first is None else str(first))


def items_of(tasks: Mapping[str, Any], limit: int | None) -> dict[str, list[Item]]:
    """Items of each task of the harness, by name. limit: evaluate.limit."""
    return {
        name: [item_of(task, document) for _, document in task.doc_iterator(limit=limit)]
        for name, task in sorted(tasks.items())
    }


def item_values(
    samples: Mapping[str, list[dict[str, Any]]], tasks: Mapping[str, Any], of: Evaluated
) -> ItemValues:
    """Values in the samples of the harness; of a metric whose values are no finite numbers none."""
    values = {}
    for name, of_task in sorted(samples.items()):
        metrics: dict[str, list[Any]] = {}
        items: dict[int, str] = {}  # by document: each filter has a sample of it
        for sample in of_task:
            items[sample["doc_id"]] = item_of(tasks[name], sample["doc"]).digest
            for metric in sample["metrics"]:
                kept = metric if sample["filter"] == "none" else f"{metric},{sample['filter']}"
                metrics.setdefault(kept, []).append(sample[metric])
        numbers = {
            metric: [float(value) for value in found]
            for metric, found in metrics.items()
            if len(found) == len(items)
            and all(isinstance(value, Real) and isfinite(value) for value in found)
        }
        values[name] = TaskValues(items=[*items.values()], metrics=numbers)
    return ItemValues(of=of, tasks=values)


# --- the search -------------------------------------------------------------------------------------

Verdict = Literal["contaminated", "question only", "clean", "not checkable"]


class ItemFound(RecordPart):
    """Shares of the sequences of an item that the text holds: of its question alone, of question and
    answer, and of those of the latter that reach into the answer; None where it is too short."""

    item: str
    """Digest of question and answer."""
    verdict: Verdict
    question: float | None = None
    whole: float | None = None
    answer: float | None = None
    files: list[str]
    """The first files with the most of its sequences, `source: file` where the run has sources."""


class TextsOfSource(RecordPart):
    """Text files of a source, and how they are read. tokens: blake3 of the manifest that lists them."""

    tokens: str
    settings: dict[str, Any]
    files: list[InputEntry]
    is_plain: bool = False
    """Documents of a packed format are searched without its marks, which part question and answer."""


class Text(NamedTuple):
    """A text file, by the name that is told, and the blake3 that it had when it was tokenized."""

    name: str
    file: InputFile
    digest: str
    settings: Tokenize
    is_plain: bool


def search(
    items: Mapping[str, Sequence[Item]],
    share: float,
    texts: Mapping[str, TextsOfSource],
    places: Mapping[str, Mapping[str, str]],
) -> dict[str, list[ItemFound]]:
    """Shares and verdict of each item of each task: the same for any number of workers.

    share: as evaluate.contamination. places: source -> name of a file -> its path here. Raises DataError
    where a file cannot be read, or is not the one that was tokenized, and UnfitError where a worker was
    killed.
    """
    listed = []
    for source, of_source in texts.items():
        settings = checked(Tokenize, of_source.settings, "tokenize")
        corpus.import_plugin(settings)
        for name, size, digest in ((e.name, e.size, e.digest) for e in of_source.files):
            file = InputFile(name, places[source].get(name, name), size)
            told = f"{source}: {name}" if source else name
            listed.append(Text(told, file, digest, settings, of_source.is_plain))
    sequences = Sequences(item for of_task in items.values() for item in of_task)
    held, numbers = _files_by_sequence(listed, sequences), iter(sequences.items)

    def found(item: Item) -> ItemFound:
        if (of_item := next(numbers)) is None:
            return ItemFound(item=item.digest, verdict="not checkable", files=[])
        question, whole, answer = (
            round(sum(one in held for one in part) / len(part), 4) if part else None
            for part in of_item
        )
        verdict: Verdict = "clean"
        if max(question or 0, whole or 0) >= share:
            verdict = "contaminated" if min(whole or 0, answer or 0) >= share else "question only"
        files = Counter(name for one in {*of_item.whole} for name in held.get(one, ()))
        return ItemFound(
            item=item.digest,
            verdict=verdict,
            question=question,
            whole=whole,
            answer=answer,
            files=sorted(files, key=lambda name: (-files[name], name))[:MOST_FILES],
        )

    return {name: [found(item) for item in of_task] for name, of_task in items.items()}


def _files_by_sequence(texts: list[Text], sequences: Sequences) -> dict[int, list[str]]:
    """Number of each sequence that documents of the training split hold -> the first files with it."""
    workers, total = available_cores(), sum(text.file.size for text in texts)
    limit = min(PART_BYTES, total // (4 * workers) + 1)
    groups = list(grouped(texts, lambda text: text.file.size, limit))
    found: dict[int, list[str]] = {}

    def make(_: int, group: list[Text], consumed: Consumed) -> dict[str, set[int]]:
        return {text.name: _held(text, sequences, consumed) for text in group}

    def receive(held: dict[str, set[int]]) -> None:
        for name, numbers in held.items():
            for one in numbers:
                found[one] = sorted({*found.get(one, ()), name})[:MOST_FILES]

    made_by_workers("contamination", groups, total, workers, make=make, receive=receive)
    return found


def _held(text: Text, sequences: Sequences, consumed: Consumed) -> set[int]:
    """Numbers of the sequences in the documents of a file that are trained on."""
    hasher, held, settings = blake3(), set[int](), text.settings
    for document in corpus.read_documents(
        text.file, settings, warn=lambda _: None, consumed=consumed, hasher=hasher
    ):
        if split_of(document, settings.val_fraction) == "train":
            searched = plain_text(document, settings) if text.is_plain else document
            held |= sequences.found(searched)
    if (digest := hasher.hexdigest()) != text.digest:
        raise DataError(
            f"{text.file.location} is not the file that was tokenized",
            cause=f"it was edited after that; its digest is {digest[:12]}, not {text.digest[:12]}",
            fix="restore it, or leave evaluate.contamination out",
        )
    return held
