"""`forge sources`: the list of the tokens of all tokenize.sources, and these tokens as one set of files.

`data/tokens/{id}/manifest.json` of a run with sources names the tokens of each source by id and digest.
Their shards stay in `data/tokens/{id of the source}`, shared by all runs; in a copy on a node's disk they
are in directories of these names beside the manifest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from forge.core.config import ResolvedConfig
from forge.core.errors import DataError
from forge.core.file_list import verify
from forge.core.files import digest_bytes, read_json
from forge.core.paths import MANIFEST, tokens_folder
from forge.core.records import Record, RecordPart
from forge.core.terminal import say
from forge.data.shards import (
    DIGEST,
    SPLITS,
    Kind,
    Member,
    ShardManifest,
    ShardSet,
    num_windows,
)

AGAIN = "run `forge tokenize CONFIG` again"
# A larger share of the tokens of a split that no sequence has is worth a warning.
MUCH_UNUSED = 0.2


class ListedTokens(RecordPart):
    """The tokens of a source: content id, which is also a directory, and digest of their manifest."""

    id: str = Field(pattern=r"^[0-9a-f]{12}$")
    digest: str = Field(pattern=DIGEST)


class SourcesManifest(Record):
    """manifest.json in `data/tokens/{id}` of a run with sources."""

    FIX: ClassVar[str] = AGAIN

    sources: dict[str, ListedTokens]
    """The sources, sorted by name."""


@dataclass(frozen=True)
class SourceSet:
    """The shards of several sources, where they were made or as a copy on the disk of a node."""

    kind: ClassVar[Kind] = "shards"

    folder: Path  # of the list
    by_source: dict[str, ShardSet]
    digest: str  # of the list, which has the digest of each source

    @property
    def vocab_size(self) -> int:
        return self._first.vocab_size

    @property
    def eos_id(self) -> int:
        return self._first.eos_id

    @property
    def tokenizer_digest(self) -> str:
        return self._first.tokenizer_digest

    @property
    def masked(self) -> bool:
        """Return whether some tokens of a source are read and never learned."""
        return any(shards.masked for shards in self.by_source.values())

    @property
    def _first(self) -> ShardSet:
        return next(iter(self.by_source.values()))

    @property
    def members(self) -> list[Member]:
        """All shards, and the manifest of each source."""
        sets = {shards.manifest.id: shards for shards in self.by_source.values()}
        return [
            Member(member.path, f"{name}/{member.name}", member.num_bytes)
            for name, shards in sets.items()
            for member in (*shards.members, _manifest_of(shards))
        ]

    @property
    def num_bytes(self) -> int:
        return sum(member.num_bytes for member in self.members)

    def verify(self, share: tuple[int, int] = (0, 1)) -> None:
        """Verify the shards of all sources, as `ShardSet.verify`. The manifests were verified when they
        were opened."""
        verify([shards.file_list for shards in self.by_source.values()], share)
        for shards in self.by_source.values():
            shards.check_reading((shards.train + shards.val)[share[0] :: share[1]])


# What a run trains on.
Tokens = ShardSet | SourceSet


def _manifest_of(shards: ShardSet) -> Member:
    path = shards.folder / MANIFEST
    return Member(path, MANIFEST, path.stat().st_size)


def open_tokens(folder: Path) -> Tokens:
    """Tokens that the manifest in a directory lists: the shards of a corpus, or of several sources;
    checks all sizes. Raises DataError. Every rank calls it. `verify` checks the digests."""
    path = folder / MANIFEST
    listed = read_json(path)
    if not isinstance(listed, dict) or "sources" not in listed:
        return ShardSet.open(folder)
    sources = SourcesManifest.read(path).sources
    by_source = {name: _open(folder, name, sources[name]) for name in sorted(sources)}
    if len({shards.tokenizer_digest for shards in by_source.values()}) > 1:
        raise DataError(
            f"the sources that {path} lists were made with different tokenizers",
            cause="the tokenizer was made again after the first of them",
            fix=AGAIN,
        )
    return SourceSet(folder, by_source, digest_bytes(path.read_bytes()))


def open_copy(copy: Path, shared: Path) -> Tokens:
    """Open tokens in their copy on this node, in the shared directory where the copy has disappeared. As
    `open_tokens`."""
    if (copy / MANIFEST).exists():
        return open_tokens(copy)
    say(f"warning: {copy} has disappeared, reading the shards from {shared}")
    return open_tokens(shared)


def digests_by_source(tokens: Tokens) -> dict[str, str]:
    """Digest of the tokens of each source, for the lineage; {} of a single corpus."""
    if isinstance(tokens, ShardSet):
        return {}
    return {name: shards.digest for name, shards in tokens.by_source.items()}


def _open(folder: Path, name: str, tokens: ListedTokens) -> ShardSet:
    copy = folder / tokens.id
    shards = ShardSet.open(copy if copy.is_dir() else folder.with_name(tokens.id))
    if shards.digest != tokens.digest:
        raise DataError(
            f"the tokens of source {name} in {shards.folder} have digest {shards.digest[:12]}, {folder}"
            f" lists {tokens.digest[:12]}",
            cause="its files were edited in place, and tokenized again",
            fix=AGAIN,
        )
    return shards


def list_sources(config: ResolvedConfig) -> Path:
    """Write the list of a run's sources, all of which are tokenized; the directory of it.

    The same sources give the same bytes. Raises DataError where one is not tokenized or incomplete.
    """
    folder = tokens_folder(config.data, config.ids.tokens)
    entries = {}
    for name, tokens_id in sorted(config.ids.sources.items()):
        shards = ShardSet.open(tokens_folder(config.data, tokens_id))
        entries[name] = ListedTokens(id=tokens_id, digest=shards.digest)
        say(f"source {name}: {shards.manifest.totals['train'].tokens:,} tokens in {shards.folder}")
    SourcesManifest(sources=entries).write(folder / MANIFEST)
    return folder


def manifests_there(folder: Path) -> dict[str, ShardManifest]:
    """Manifests of the tokens in a directory by source, under "" without sources; {} where they cannot be
    read."""
    try:
        return {name: shards.manifest for name, shards in open_tokens(folder).by_source.items()}
    except DataError:
        return {}


def unused_warnings(manifests: Mapping[str, ShardManifest], seq_len: int) -> list[str]:
    """Warnings of splits much of which is in no window, as with long sequences and short shards.
    manifests: by source, under "" without sources. For a split without any window, `WindowIndex` has the
    error."""
    warnings = []
    for name, manifest in manifests.items():
        for split in SPLITS:
            tokens, used = manifest.totals[split].tokens, manifest.used_tokens(split, seq_len)
            if 0 < used < (1 - MUCH_UNUSED) * tokens:
                sizes = [shard.tokens for shard in manifest.splits[split]]
                short = sum(not num_windows(size, seq_len) for size in sizes)
                warnings.append(
                    f"warning: {tokens - used:,} of {tokens:,} {f'{name} {split}'.strip()} tokens"
                    f" ({1 - used / tokens:.0%}) are never read: a sequence has train.seq_len + 1 ="
                    f" {seq_len + 1:,} tokens of one shard, and {short} of {len(sizes)} shards are"
                    " shorter (text has fewer and longer shards with a larger tokenize.part_mib)"
                )
    return warnings
