"""Token shards on disk: ids in `.bin` files, and the manifest that describes them.

- `{split}-{part}-{number}.bin`: little-endian uint16 where the vocabulary fits, else uint32
- `val-{part}-{number}.bytes`: bytes of text of each id (`data.text_bytes`), in no digest
- `manifest.json`: format, dtype, vocabulary, settings, digests of inputs and shards
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any, ClassVar, Literal, Protocol, Self

import blake3
import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import Field, model_validator

from forge.core.errors import DataError
from forge.core.file_list import FileEntry, FileList, verify
from forge.core.files import (
    MAX_JSON_BYTES,
    RelativePath,
    atomic_open,
    digest_bytes,
    disk_trouble,
)
from forge.core.paths import MANIFEST
from forge.core.records import Record, RecordPart
from forge.core.text_formats import READINGS, UNRECORDED_DTYPE, misread
from forge.core.tokenize_settings import TOKEN_DTYPES
from forge.data import token_readings

Kind = Literal["shards", "inputs"]


@dataclass(frozen=True)
class Member:
    """A file or link, and its name in an archive and in a copy."""

    path: Path
    name: str
    num_bytes: int


class FileSet(Protocol):
    """The files that the manifest in `folder` lists: the token shards of a corpus (`data.shards`), or the
    input files of a program (`data.inputs`)."""

    @property
    def kind(self) -> Kind: ...

    @property
    def folder(self) -> Path:
        """The directory that has the manifest."""

    @property
    def digest(self) -> str:
        """Names a copy: sets with the same digest have the same files with the same content."""

    @property
    def members(self) -> list[Member]:
        """All files but the manifest."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, without the manifest."""

    def verify(self, share: tuple[int, int] = (0, 1)) -> None:
        """Verify digests. share: (i, n) verifies every n-th file from the i-th on, for n readers.

        Raises DataError that names the first file that is missing, truncated or changed.
        """


Ids = NDArray[np.uint32]
Bytes = NDArray[np.uint32]  # of text, of each id
Split = Literal["train", "val"]
SPLITS: tuple[Split, ...] = ("train", "val")
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}

DIGEST = r"^[0-9a-f]{64}$"
# A plain file name: a manifest from elsewhere must not lead readers out of the directory.
SHARD_NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]*\.bin$"

AGAIN = "remove the directory and run `forge tokenize CONFIG` (or stage) again"
# Shards of each split that `open` reads the beginning of, to check how ids were read; `verify` takes all.
FIRST_SHARDS = 4


def dtype_name(vocab_size: int) -> Literal["uint16", "uint32"]:
    """The smallest dtype that holds ids 0 .. vocab_size - 1."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


# --- manifest -----------------------------------------------------------------------------------


class InputEntry(RecordPart):
    """An input file: name as in the config, bytes, blake3."""

    name: str
    size: int = Field(ge=0)
    digest: str = Field(pattern=DIGEST)

    @property
    def entry(self) -> FileEntry:
        return FileEntry(self.size, self.digest)


class PathEntry(InputEntry):
    """An input file: path below a directory that the manifest names, bytes, blake3."""

    name: RelativePath


def num_windows(num_tokens: int, seq_len: int) -> int:
    """Number of windows of seq_len + 1 tokens in a shard. The last token of a window is only a target: it
    is the first token of the next window."""
    return max(num_tokens - 1, 0) // seq_len


class ShardEntry(RecordPart):
    """A shard: file name, number of tokens and documents, blake3."""

    file: str = Field(pattern=SHARD_NAME, max_length=255)
    tokens: int = Field(ge=1)
    documents: int = Field(ge=1)
    digest: str = Field(pattern=DIGEST)


class Total(RecordPart):
    """Sums over the shards of one split."""

    shards: int
    documents: int
    tokens: int

    @classmethod
    def of(cls, shards: list[ShardEntry]) -> Self:
        return cls(
            shards=len(shards),
            documents=sum(shard.documents for shard in shards),
            tokens=sum(shard.tokens for shard in shards),
        )


class ShardManifest(Record):
    """manifest.json: what readers of the shards need, and the settings and inputs that made them."""

    FIX: ClassVar[str] = AGAIN
    MAX_BYTES: ClassVar[int] = MAX_JSON_BYTES

    id: str
    dtype: Literal["uint16", "uint32"]
    vocab_size: int = Field(ge=1)
    eos_id: int = Field(ge=0)
    tokenizer_id: str
    tokenizer_digest: str = Field(pattern=DIGEST)
    settings: dict[str, Any]
    inputs: list[InputEntry]
    splits: dict[Split, list[ShardEntry]]
    totals: dict[Split, Total]
    masked: bool = Field(False, exclude_if=lambda masked: not masked)
    """Shards have `vocab_size` + id for a token that is read and never learned."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.vocab_size * (1 + self.masked) > 2 ** (8 * DTYPES[self.dtype].itemsize):
            raise ValueError(f"{self.vocab_size} token ids do not fit into {self.dtype}")
        if self.eos_id >= self.vocab_size:
            raise ValueError(f"eos_id {self.eos_id} is not below vocab_size {self.vocab_size}")
        for split in SPLITS:
            if split not in self.splits or split not in self.totals:
                raise ValueError(f"split {split} is missing")
            if self.totals[split] != Total.of(self.splits[split]):
                raise ValueError(f"totals of {split} are not the sums over its shards")
        return self

    def used_tokens(self, split: Split, seq_len: int) -> int:
        """Tokens of a split that are read in an epoch: those in windows. The end of a shard, shorter than
        a window, is in none."""
        return seq_len * sum(num_windows(shard.tokens, seq_len) for shard in self.splits[split])

    def write(self, path: Path) -> None:
        """Write the file, as `Record.write`."""
        # json indents in Python: 0.3 s for 20,000 inputs, orjson 0.01 s.
        options = orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE
        values = {"format": self.FORMAT, **self.model_dump(mode="json")}
        with atomic_open(path) as file:
            file.write(orjson.dumps(values, option=options))


# --- reading ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shard:
    """One file of token ids."""

    path: Path
    num_tokens: int
    dtype: np.dtype[Any]
    masked_from: int = 0
    """Numbers from here on are ids of tokens that are read and never learned, plus this; 0 for none."""

    @property
    def num_bytes(self) -> int:
        return self.num_tokens * self.dtype.itemsize

    @property
    def bytes_path(self) -> Path:
        """The file with the bytes of text of each id (`data.text_bytes`), of a validation shard."""
        return self.path.with_suffix(".bytes")

    def num_windows(self, seq_len: int) -> int:
        """Number of windows of seq_len + 1 tokens."""
        return num_windows(self.num_tokens, seq_len)

    def read(self) -> np.memmap[Any, Any]:
        """The ids, with `masked_from`, memory-mapped and read-only: shape (num_tokens,)."""
        return np.memmap(self.path, dtype=self.dtype, mode="r", shape=(self.num_tokens,))

    def ids(self, first: int = 0, end: int | None = None) -> NDArray[Any]:
        """The ids alone, of the tokens `first` up to `end`."""
        ids = self.read()[first:end]
        return ids % self.masked_from if self.masked_from else ids


def shard_list(
    folder: Path, splits: dict[Split, list[ShardEntry]], dtype: np.dtype[Any]
) -> FileList:
    """The shards of all splits. They may be links: a user may have moved them to another disk."""
    entries = {
        shard.file: FileEntry(shard.tokens * dtype.itemsize, shard.digest)
        for shards in splits.values()
        for shard in shards
    }
    return FileList(folder, entries, fix=AGAIN, follow_links=True)


@dataclass(frozen=True)
class ShardSet:
    """The shards of a corpus, as listed by the manifest of their directory."""

    kind: ClassVar[Kind] = "shards"

    folder: Path
    manifest: ShardManifest
    digest: str  # of manifest.json; checkpoints record it in their lineage
    train: list[Shard]
    val: list[Shard]

    @classmethod
    def open(cls, folder: Path) -> ShardSet:
        """Read the manifest and check the size of every shard. Raises DataError.

        Every rank calls it. `verify` checks the digests.
        """
        manifest = ShardManifest.read(folder / MANIFEST)
        _require_right_reading(folder, manifest)
        dtype, masked_from = DTYPES[manifest.dtype], manifest.vocab_size * manifest.masked
        train, val = (
            [
                Shard(folder / entry.file, entry.tokens, dtype, masked_from)
                for entry in manifest.splits[split]
            ]
            for split in SPLITS
        )
        shard_list(folder, manifest.splits, dtype).check_sizes()
        digest = digest_bytes((folder / MANIFEST).read_bytes())
        shards = cls(folder, manifest, digest, train, val)
        shards.check_reading(train[:FIRST_SHARDS] + val[:FIRST_SHARDS])
        return shards

    @property
    def vocab_size(self) -> int:
        return self.manifest.vocab_size

    @property
    def eos_id(self) -> int:
        return self.manifest.eos_id

    @property
    def tokenizer_digest(self) -> str:
        return self.manifest.tokenizer_digest

    @property
    def masked(self) -> bool:
        """Return whether some tokens are read and never learned."""
        return self.manifest.masked

    @property
    def by_source(self) -> dict[str, ShardSet]:
        """The shards by source, as `data.sources` has them: a single corpus has no name."""
        return {"": self}

    @property
    def members(self) -> list[Member]:
        return [Member(s.path, s.path.name, s.num_bytes) for s in self.train + self.val]

    @property
    def file_list(self) -> FileList:
        return shard_list(self.folder, self.manifest.splits, DTYPES[self.manifest.dtype])

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards, without the manifest."""
        return sum(shard.num_bytes for shard in self.train + self.val)

    def verify(self, share: tuple[int, int] = (0, 1)) -> None:
        """Verify digests, and `check_reading`. share, errors: as `file_list.verify`."""
        verify([self.file_list], share)
        self.check_reading((self.train + self.val)[share[0] :: share[1]])

    def check_reading(self, shards: Sequence[Shard]) -> None:
        """DataError for a shard by which an earlier version of Forge read ids of another width, or a
        header, as ids. Reads the first KiB of each."""
        settings = self.manifest.settings
        if settings.get("format") in UNRECORDED_DTYPE:
            for shard in shards:
                refuse_reading(shard, settings, self.vocab_size, self.eos_id)


def refuse_reading(shard: Shard, settings: dict[str, Any], vocab_size: int, eos_id: int) -> None:
    """DataError for a shard whose ids were of another kind than settings["token_dtype"] says."""
    name = settings.get("token_dtype")
    if name not in TOKEN_DTYPES:
        return
    dtype = np.dtype(name).newbyteorder("<")
    with disk_trouble(shard.path, "read"):
        ids = np.fromfile(shard.path, shard.dtype, token_readings.SET_SAMPLE_IDS)
    wrong = token_readings.wrong_shard(ids, dtype, vocab_size=vocab_size, eos_id=eos_id)
    if wrong:
        raise DataError(
            f"{shard.path} {wrong}",
            cause=f"an earlier version of Forge read its input files as ids of {name}, and they are not",
            fix=f"{AGAIN}: it says what is in them",
        )


def _require_right_reading(folder: Path, manifest: ShardManifest) -> None:
    """DataError for tokens of a file that an earlier version took for text."""
    kind, readings = manifest.settings.get("format"), manifest.settings.get(READINGS)
    for entry in manifest.inputs:
        if what := misread(entry.name, str(kind), readings if isinstance(readings, list) else []):
            raise DataError(
                f"the tokens in {folder} are not those of the text: {entry.name} {what}",
                cause="an earlier version of Forge made them",
                fix="correct the inputs, and train a run with a new name",
            )


# --- writing ------------------------------------------------------------------------------------


class EndInDocument(Exception):
    """A document has the end-of-text id, and would be read as two."""


class ShardWriter:
    """Writes documents into shards `{prefix}-000.bin`, `-001`, …, each visible once it is complete.

    A context manager; `entries` lists the shards after it has ended without an error. A shard ends
    at the first document that reaches `shard_tokens`.
    """

    def __init__(
        self,
        folder: Path,
        prefix: str,
        vocab_size: int,
        shard_tokens: int,
        tail: Sequence[int] = (),
    ) -> None:
        """tail: of each shard, after its last document."""
        self.folder, self.prefix, self._tail = folder, prefix, np.array(tail, np.uint32)
        self.vocab_size, self.shard_tokens = vocab_size, shard_tokens
        self.entries: list[ShardEntry] = []
        self._dtype = DTYPES[dtype_name(vocab_size)]
        self._begin()

    def _begin(self) -> None:
        self._tokens = self._documents = 0
        self._hasher = blake3.blake3()
        self._file: IO[bytes] | None = None
        self._bytes_file: IO[bytes] | None = None
        self._open_files = ExitStack()

    def extend(self, documents: Sequence[Ids], end: Ids, sizes: Sequence[Bytes] = ()) -> None:
        """Append documents, each followed by `end`: an array of the end-of-text id, or empty. sizes: for
        the `.bytes` file, bytes of the ids of each document and of its end.

        Raises EndInDocument where a document contains this id, UnfitError on a full disk.
        """
        pending: list[Ids] = []  # one array of many documents: short ones cost more calls than work
        pending_sizes: list[Bytes] = []
        for ids, of_ids in zip_longest(documents, sizes):
            pending += (ids, end)
            pending_sizes += [] if of_ids is None else [of_ids]
            self._tokens += len(ids) + len(end)
            self._documents += 1
            if self._tokens >= self.shard_tokens:
                self._write(pending, end, pending_sizes)
                self._commit()
                pending, pending_sizes = [], []
        if pending:
            self._write(pending, end, pending_sizes)

    def add_block(self, block: Ids, num_documents: int) -> None:
        """Append whole documents, which stay in one shard. UnfitError on a full disk."""
        self._write([block], self._tail[:0], [])
        self._tokens += len(block)
        self._documents += num_documents
        if self._tokens >= self.shard_tokens:
            self._commit()

    def _write(self, arrays: list[Ids], end: Ids, sizes: list[Bytes]) -> None:
        ids = np.concatenate(arrays)
        if len(end) and np.count_nonzero(ids == end) != len(arrays) // 2:
            raise EndInDocument
        # The conversion to uint16 would silently wrap an id beyond the vocabulary.
        assert int(ids.max()) < self.vocab_size, f"id {ids.max()} beyond {self.vocab_size}"
        if self._file is None:
            self._file = self._opened(self._name)
        data = ids.astype(self._dtype).data.cast("B")
        self._file.write(data)
        self._hasher.update(data)
        if sizes:
            if self._bytes_file is None:
                self._bytes_file = self._opened(Path(self._name).with_suffix(".bytes").name)
            self._bytes_file.write(np.concatenate(sizes).astype("<u4").data.cast("B"))

    def _opened(self, name: str) -> IO[bytes]:
        # The directory is fsynced once, before the manifest.
        return self._open_files.enter_context(atomic_open(self.folder / name, sync_folder=False))

    @property
    def _name(self) -> str:
        return f"{self.prefix}-{len(self.entries):03d}.bin"

    def _commit(self) -> None:
        if len(self._tail):
            self._write([self._tail], self._tail[:0], [])
            self._tokens += len(self._tail)
        self._open_files.close()
        entry = ShardEntry(
            file=self._name,
            tokens=self._tokens,
            documents=self._documents,
            digest=self._hasher.hexdigest(),
        )
        self.entries.append(entry)
        self._begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        if any(error):
            self._open_files.__exit__(*error)
        elif self._tokens:
            self._commit()
