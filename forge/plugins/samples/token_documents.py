"""Documents of a token set: where each lies in the shards, and in which input file."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import blake3
import numpy as np

from forge.core.errors import DataError
from forge.core.files import grouped
from forge.core.text_formats import TOKEN_FORMATS
from forge.core.tokenize_settings import Tokenize
from forge.data import corpus
from forge.data.corpus import STDLIB, TOPICS, InputFile
from forge.data.hub import SCHEME
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
        downloads: Path | None = None,
    ) -> None:
        """texts: by digest, in place of the files that the manifest names. downloads: directory of the
        files of a hub."""
        self.shards, self._decode, self._texts = shards, decode, texts
        self._downloads, self._given = downloads, dict[str, InputFile]()
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

    def origin(self, shard: Shard, span: Span, digest: str = "") -> Origin:
        """Origin of a document: by its number in the shard, or, where documents are packed into windows
        in another order, by its text. digest: of the file to prefer, where several have that text."""
        part = _part(shard)
        if not self._is_text or part >= len(self._parts):
            return Origin()
        if self.shards.masked:
            same = self._of_text(part, *self._text(shard, span.start))
            of_part = ", ".join(entry.name for entry in self._parts[part])
            preferred = next((o for o in same if o.digest == digest), None)
            return preferred or next(iter(same), Origin(one_of=of_part))
        # In the order of the manifest: by name, shard 1000 of a part would come before shard 200.
        before = takewhile(
            lambda entry: entry.file != shard.path.name, self.shards.manifest.splits["train"]
        )
        earlier = [
            entry.documents for entry in before if _part(self.shards.folder / entry.file) == part
        ]
        found, num_files = self.origins(part)
        place = sum(earlier) + span.number
        if place < len(found):
            return found[place]
        names = [entry.name for entry in self._parts[part][num_files:]]
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        return Origin(one_of=", ".join(names[:MOST_NAMED]) + more)

    def _text(self, shard: Shard, start: int) -> tuple[str, bool]:
        """The document that begins at this token of packed windows, and whether its end may be cut."""
        seq_len = self._settings["seq_len"]
        ids = shard.ids(start, start + seq_len)
        ends = np.flatnonzero(ids == self.shards.eos_id)
        is_full = len(ends) > 0 and ends[0] == seq_len - 1
        may_be_cut = is_full and self._settings.get("too_long") == "cut"
        return self._decode(ids[: ends[0] if len(ends) else None].tolist()), bool(may_be_cut)

    def _of_text(self, part: int, text: str, may_be_cut: bool) -> list[Origin]:
        """Documents of a part with this text; without any, where it may be cut, those that begin so."""
        there = self.origins(part)[0]
        whole = [o for o in there if o.text == text]
        if whole or not may_be_cut:
            return whole
        begun = text.rstrip("\ufffd")  # a character of which not all bytes are within the window
        return [o for o in there if o.text.startswith(begun)]

    def parts_of(self, digest: str) -> list[int]:
        """Numbers of the parts with input files of this digest."""
        return [
            number
            for number, entries in enumerate(self._parts)
            if any(entry.digest == digest for entry in entries)
        ]

    def take_file(self, digest: str, file: Path) -> None:
        """Read the documents of this digest from a file, whatever its name is. DataError where it is not
        known which documents of the tokens they are."""
        self._given[digest] = InputFile(str(file), str(file), file.stat().st_size)
        self.origins.cache_clear()
        parts = self.parts_of(digest)
        if parts and not self._is_text:
            raise DataError(
                f"cannot tell which documents are of {file}: it has ids of another program",
                fix="name a phrase of the text: --text PHRASE",
            )
        for part in parts:
            entries, num_files = self._parts[part], self.origins(part)[1]
            if any(entry.digest == digest for entry in entries[num_files:]):
                raise DataError(
                    f"cannot tell which documents are of {file}: {entries[num_files].name} is not here"
                    " as it was",
                    cause="documents are counted through the files that were tokenized together",
                    fix="restore it, or name a phrase of the text: --text PHRASE",
                )

    def shards_of(self, part: int) -> list[Shard]:
        """The training shards of a part, in order."""
        return [shard for shard in self.shards.train if _part(shard) == part]

    def _origins(self, part: int) -> tuple[list[Origin], int]:
        """Origins of the training documents of a part, up to the first file that is not here, and the
        number of files before that one."""
        found: list[Origin] = []
        for num_files, entry in enumerate(self._parts[part]):
            documents = self._read(entry)
            if documents is None:
                return found, num_files
            found += [
                Origin(entry.name, entry.digest, number, text)
                for number, text in enumerate(documents, start=1)
                if split_of(text, self._settings["val_fraction"]) == "train"
            ]
        return found, len(self._parts[part])

    def _read(self, entry: InputEntry) -> list[str] | None:
        """Documents of an input file; None where it is not here or has other bytes."""
        file = self._file_of(entry)
        keys = {key: value for key, value in self._settings.items() if key in Tokenize.model_fields}
        settings = Tokenize.model_validate({**keys, "inputs": [entry.name]})
        hasher = blake3.blake3()
        try:
            if file is None or not os.path.isfile(file.location):  # noqa: PTH113
                return None
            # By the ending that the manifest has, which tells the format.
            named = file._replace(name=entry.name)
            documents = corpus.read_documents(named, settings, warn=lambda _: None, hasher=hasher)
            texts = list(documents)
        except DataError:
            return None
        return texts if hasher.hexdigest() == entry.digest else None

    def _file_of(self, entry: InputEntry) -> InputFile | None:
        """An input file: the one that was given for its digest, else by the name that the manifest has;
        None where it is not there or its size differs."""
        if entry.name == TOPICS:  # read from this Python, wherever the file is
            return _library().get(TOPICS)
        if given := self._given.get(entry.digest):
            return given
        if self._texts is not None:
            return self._texts.get(entry.digest)
        if entry.name.startswith(STDLIB):
            return _library().get(entry.name)
        path = Path(entry.name)
        if entry.name.startswith(SCHEME) and self._downloads:
            path = self._downloads / entry.name.removeprefix(SCHEME)
        # By os.path: False in a closed directory.
        if os.path.isfile(path) and path.stat().st_size == entry.size:  # noqa: PTH113
            return InputFile(entry.name, str(path), entry.size)
        return None


def _part(shard: Shard | Path) -> int:
    """The number of the part that a shard is of, which its name has (`data.shards`)."""
    path = shard if isinstance(shard, Path) else shard.path
    return int(path.name.split("-")[1])


@functools.cache
def _library() -> dict[str, InputFile]:
    return {file.name: file for file in corpus.list_named([STDLIB])}
