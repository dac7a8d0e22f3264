"""Documents of a token set: where each lies in the shards, and in which input file."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import blake3
import numpy as np

from forge.core.errors import DataError
from forge.core.files import grouped
from forge.core.text_formats import TOKEN_FORMATS
from forge.core.tokenize_settings import Tokenize
from forge.data import corpus
from forge.data.corpus import STDLIB, InputFile
from forge.data.shards import InputEntry, Shard, ShardSet
from forge.data.tokenize import split_of

MOST_NAMED = 3


class Span(NamedTuple):
    """Tokens [first, end) of a document. number: of the document in its shard. start: its first token."""

    number: int
    start: int
    first: int
    end: int


@dataclass(frozen=True)
class Origin:
    """Input file of a document, and its number among those of the file, from 1 on.

    one_of: the files of which it is one, where that one is not here as it was, for people.
    """

    input: str | None = None
    digest: str | None = None
    number: int | None = None
    text: str = ""
    one_of: str = ""

    @property
    def keys(self) -> dict[str, Any]:
        """Keys for JSON."""
        known = {"input": self.input, "blake3": self.digest, "document": self.number}
        return known if self.input else {**known, "one_of": self.one_of}


class TokenDocuments:
    """Documents of the training shards of a token set. The files are those that its manifest names: what
    a file has counts only with the digest that it has there."""

    def __init__(
        self,
        shards: ShardSet,
        decode: Callable[[list[int]], str],
        texts: Mapping[str, InputFile] | None = None,
    ) -> None:
        """texts: by digest, in place of the files that the manifest names."""
        self.shards, self._decode, self._texts = shards, decode, texts
        manifest = shards.manifest
        self._settings: dict[str, Any] = manifest.settings
        self._is_text = manifest.settings.get("format") not in TOKEN_FORMATS
        part_bytes = manifest.settings.get("part_mib", 0) * 2**20
        self._parts = (
            list(grouped(manifest.inputs, lambda entry: entry.size, part_bytes))
            if part_bytes
            else []
        )
        self.origins = functools.lru_cache(maxsize=4)(self._origins)

    def spans(self, shard: Shard, first: int, last: int) -> Iterator[Span]:
        """The parts of documents in the tokens [first, last), each with the token that ends it; without
        padding."""
        ids = shard.ids()
        ends = first + np.flatnonzero(ids[first:last] == self.shards.eos_id)
        before = np.flatnonzero(ids[:first] == self.shards.eos_id)
        number, start, here = len(before), int(before[-1]) + 1 if len(before) else 0, first
        for end in [*ends.tolist(), last - 1]:
            is_padding = self.shards.masked and start == end
            if here <= end and not is_padding:
                yield Span(number, start, here, end + 1)
            number, start, here = number + 1, end + 1, end + 1

    def origin(self, shard: Shard, span: Span) -> Origin:
        """Origin of a document: by its number in the shard, or, where documents are packed into windows
        in another order, by its text."""
        part = _part(shard)
        if not self._is_text or part >= len(self._parts):
            return Origin()
        if self.shards.masked:
            text = self._text(shard, span.start)
            of_part = ", ".join(entry.name for entry in self._parts[part])
            return next((o for o in self.origins(part) if o.text == text), Origin(one_of=of_part))
        earlier = [
            entry.documents
            for entry in self.shards.manifest.splits["train"]
            if _part(self.shards.folder / entry.file) == part and entry.file < shard.path.name
        ]
        found = self.origins(part)
        place = sum(earlier) + span.number
        if place < len(found):
            return found[place]
        there = {origin.input for origin in found}
        names = [entry.name for entry in self._parts[part] if entry.name not in there]
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        return Origin(one_of=", ".join(names[:MOST_NAMED]) + more)

    def _text(self, shard: Shard, start: int) -> str:
        """The document that begins at this token of packed windows."""
        ids = shard.ids(start, start + self._settings["seq_len"])
        ends = np.flatnonzero(ids == self.shards.eos_id)
        return self._decode(ids[: ends[0] if len(ends) else None].tolist())

    def parts_of(self, digest: str) -> list[int]:
        """Numbers of the parts with input files of this digest."""
        return [
            number
            for number, entries in enumerate(self._parts)
            if any(entry.digest == digest for entry in entries)
        ]

    def shards_of(self, part: int) -> list[Shard]:
        """The training shards of a part, in order."""
        return [shard for shard in self.shards.train if _part(shard) == part]

    def _origins(self, part: int) -> list[Origin]:
        """Origins of the training documents of a part, up to the first file that is not here."""
        found: list[Origin] = []
        for entry in self._parts[part]:
            documents = self._read(entry)
            if documents is None:
                break
            found += [
                Origin(entry.name, entry.digest, number, text)
                for number, text in enumerate(documents, start=1)
                if split_of(text, self._settings["val_fraction"]) == "train"
            ]
        return found

    def _read(self, entry: InputEntry) -> list[str] | None:
        """Documents of an input file; None where it is not here or has other bytes."""
        file = _file_of(entry) if self._texts is None else self._texts.get(entry.digest)
        keys = {key: value for key, value in self._settings.items() if key in Tokenize.model_fields}
        settings = Tokenize.model_validate({**keys, "inputs": [entry.name]})
        hasher = blake3.blake3()
        try:
            if file is None or not file.path.is_file():
                return None
            documents = corpus.read_documents(file, settings, warn=lambda _: None, hasher=hasher)
            texts = list(documents)
        except DataError:
            return None
        return texts if hasher.hexdigest() == entry.digest else None


def _part(shard: Shard | Path) -> int:
    """The number of the part that a shard is of, which its name has (`data.shards`)."""
    path = shard if isinstance(shard, Path) else shard.path
    return int(path.name.split("-")[1])


def _file_of(entry: InputEntry) -> InputFile | None:
    """An input file by the name that the manifest has; None where its size differs."""
    if entry.name.startswith(STDLIB):
        return _library().get(entry.name)
    path = Path(entry.name)
    if path.is_file() and path.stat().st_size == entry.size:
        return InputFile(entry.name, entry.name, entry.size)
    return None


@functools.cache
def _library() -> dict[str, InputFile]:
    return {file.name: file for file in corpus.list_named([STDLIB])}
