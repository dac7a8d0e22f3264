"""Sets of files that staging copies to nodes: files that a manifest lists with their digests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

Kind = Literal["shards", "inputs"]


@dataclass(frozen=True)
class Member:
    """A file or link, and its name in an archive and in a copy."""

    path: Path
    name: str
    num_bytes: int


class FileSet(Protocol):
    """The files that the manifest in `folder` lists: the token shards of a corpus (`data.shards`), or the
    input files of a program (`data.input_set`)."""

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
