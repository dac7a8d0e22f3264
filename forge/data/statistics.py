"""statistics.json beside the manifest of a token set: counts of its text, outside of all digests."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field

from forge.core.files import MAX_JSON_BYTES
from forge.core.paths import STATISTICS
from forge.core.records import Record, RecordPart


class TextCounts(RecordPart):
    """Counts of the documents of some input files: without white-space-only ones, as encoded."""

    bytes: int = 0
    """In UTF-8."""
    characters: int = 0

    def __add__(self, other: Self) -> Self:
        names = type(self).model_fields
        return type(self)(**{name: getattr(self, name) + getattr(other, name) for name in names})


class Statistics(Record):
    """statistics.json: counts for people. Written before the manifest, and read by no step of a run: sets
    of earlier versions have none, and no digest covers it."""

    MAX_BYTES: ClassVar[int] = MAX_JSON_BYTES

    text: TextCounts | None = None
    """None for files of ids (tokenize.format nanogpt, megatron, dolma)."""
    equal_files: list[list[str]] = Field(default_factory=list)
    """Groups of different input files with equal content, by name as in the manifest."""


def read_statistics(folder: Path) -> Statistics | None:
    """The statistics of the tokens in a directory; None where they were made without. Raises DataError
    for a corrupt file."""
    return Statistics.read_if_there(folder / STATISTICS)
