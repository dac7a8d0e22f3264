"""statistics.json beside the manifest of a token set: counts of its text, outside of all digests."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field

from forge.core.files import MAX_JSON_BYTES
from forge.core.paths import STATISTICS
from forge.core.records import Record, RecordPart, TextBytes
from forge.data.shards import InputEntry

NUMBERS = (
    "bytes",
    "characters",
    "lost",
    "changed",
    "white_space",
    "text_files",
    "divided_files",
)
MOST_LOST = 20
WORTH_SAYING = 0.001  # a smaller share of lost or changed characters is only in the file


class TextCounts(RecordPart):
    """Counts of the documents of some input files: without white-space-only ones, as encoded."""

    bytes: int = 0
    """In UTF-8."""
    characters: int = 0
    lost: int = 0
    """Characters that the ids do not give back."""
    changed: int = 0
    """Characters whose case, accent or compatibility form the tokenizer's normalizer takes away."""
    white_space: int = 0
    """White space and control characters that the tokenizer takes away."""
    text_files: int = 0
    """Files that tokenize.document_separator could divide: text, without rows."""
    divided_files: int = 0
    """Text files with more than one document."""
    most_lost: dict[str, int] = Field(default_factory=dict)
    """Of the characters that are lost most often, how often: at most MOST_LOST of each part."""

    def __add__(self, other: Self) -> Self:
        numbers = {name: getattr(self, name) + getattr(other, name) for name in NUMBERS}
        most = Counter(self.most_lost) + Counter(other.most_lost)
        return type(self)(**numbers, most_lost=dict(most.most_common(MOST_LOST)))

    @property
    def lost_share(self) -> float:
        """Share of all characters that is lost."""
        return self.lost / max(1, self.characters)

    @property
    def changes(self) -> str:
        """`3 characters change (case, accents), 20 of white space are left out`; "" without any."""
        parts = []
        if self.changed:
            parts.append(f"{self.changed:,} characters change (case, accents, compatibility forms)")
        if self.white_space:
            parts.append(f"{self.white_space:,} characters of white space are left out")
        return ", ".join(parts)

    def __str__(self) -> str:
        """`12 of 3,000 characters are lost (0.4 %), most often 'ж', 'ы'`."""
        if not self.lost:
            return f"none of {self.characters:,} characters is lost"
        often = ", ".join(repr(char) for char in list(self.most_lost)[:5])
        share = f"{100 * self.lost_share:.3g} %"
        are = "is" if self.lost == 1 else "are"
        return f"{self.lost:,} of {self.characters:,} characters {are} lost ({share}), most often {often}"


class Statistics(Record):
    """statistics.json: counts for people, and for losses in bits per byte. Written before the manifest;
    sets of earlier versions have none, and no digest covers it."""

    MAX_BYTES: ClassVar[int] = MAX_JSON_BYTES

    text: TextCounts | None = None
    """None for files of ids (tokenize.format nanogpt, megatron, dolma)."""
    validation: dict[str, TextBytes] = Field(default_factory=dict)
    """Of the windows of runs, by their number and train.seq_len (`64x1024`; `64x1024~`: estimated)."""
    equal_files: list[list[str]] = Field(default_factory=list)
    """Groups of different input files with equal content, by name as in the manifest; without empty
    files."""

    @property
    def lines(self) -> list[str]:
        """Lines for people on the text and its files."""
        lines = [str(self.text), self.text.changes] if self.text else []
        if twins := sum(len(group) - 1 for group in self.equal_files):
            lines.append(f"{twins:,} input files have the content of another one")
        return [line for line in lines if line]


def equal_files(entries: list[InputEntry]) -> list[list[str]]:
    """Names of the input files whose digests are equal, as `Statistics.equal_files`."""
    by_digest: dict[str, list[str]] = {}
    for entry in entries:
        if entry.size:
            by_digest.setdefault(entry.digest, []).append(entry.name)
    return [names for names in by_digest.values() if len(names) > 1]


def read_statistics(folder: Path) -> Statistics | None:
    """The statistics of the tokens in a directory; None where they were made without. Raises DataError
    for a corrupt file."""
    return Statistics.read_if_there(folder / STATISTICS)
