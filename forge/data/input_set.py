"""The input files of another program (`program.inputs`), as listed by their manifest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from forge.core.errors import DataError
from forge.core.file_list import FileList, verify
from forge.core.files import MAX_JSON_BYTES
from forge.core.paths import MANIFEST
from forge.core.records import Record
from forge.data.shards import Kind, Member, PathEntry

# Directories beside the manifest: of local files in a copy, and of downloads everywhere.
DATA, HUB = "data", "hub"


class InputManifest(Record):
    """manifest.json in `data/inputs/{id}`. Local files stay where they are; downloads are in
    `data/inputs/{id}/hub`."""

    FIX: ClassVar[str] = "remove it and rerun the same command"
    MAX_BYTES: ClassVar[int] = MAX_JSON_BYTES

    root: str
    """The deepest directory that has all local files; "" without any."""
    files: list[PathEntry]
    """Local files, by path below `root`."""
    hub: str
    """The directory of all downloads; "" without any."""
    downloads: list[PathEntry]
    """Files of a hub, by path below `hub`: owner/name/file or datasets/owner/name/file."""
    commits: dict[str, str]
    """Repository at the revision of the config -> commit that was downloaded."""
    digest: str
    """blake3 of names, sizes and digests of all files."""


@dataclass(frozen=True)
class InputSet:
    """The files of a manifest, where they were found or as a copy on the disk of a node."""

    kind: ClassVar[Kind] = "inputs"

    folder: Path  # of the manifest
    manifest: InputManifest
    data: str  # FORGE_DATA: the directory of the local files; "" without any
    hub: str  # FORGE_HUB: the directory of the downloads; "" without any

    @classmethod
    def open(cls, folder: Path) -> Self:
        """The files where they were found, as `data/inputs/{id}` lists them.

        Raises DataError where the manifest is missing or corrupt, and for a file that was removed or has
        another size now. `verify` checks the digests.
        """
        manifest = InputManifest.read(folder / MANIFEST)
        return cls(folder, manifest, manifest.root, manifest.hub)._with_right_sizes()

    @classmethod
    def open_copy(cls, folder: Path) -> Self:
        """The files of a copy, all below `folder`. Raises DataError as `open`."""
        manifest = InputManifest.read(folder / MANIFEST)
        return cls(folder, manifest, *copy_folders(folder, manifest))._with_right_sizes()

    @property
    def digest(self) -> str:
        return self.manifest.digest

    @property
    def members(self) -> list[Member]:
        return [
            Member(Path(place) / entry.name, f"{name}/{entry.name}", entry.size)
            for place, name, entries in (
                (self.data, DATA, self.manifest.files),
                (self.hub, HUB, self.manifest.downloads),
            )
            for entry in entries
        ]

    @property
    def num_bytes(self) -> int:
        return sum(member.num_bytes for member in self.members)

    def verify(self, share: tuple[int, int] = (0, 1)) -> None:
        verify(self._file_lists, share)

    def check_unchanged(self) -> None:
        """DataError for a file that was removed, or changed after the manifest was made. Looks at the
        times of the files, and reads none of them."""
        written = (self.folder / MANIFEST).stat().st_mtime_ns
        for member in self.members:
            if not member.path.is_file() or member.path.stat().st_mtime_ns > written:
                raise DataError(
                    f"{member.path} has changed since its digest was made",
                    cause="the file was edited or removed",
                    fix=self._fix,
                )

    def _with_right_sizes(self) -> Self:
        for files in self._file_lists:
            files.check_sizes()
        return self

    @property
    def _fix(self) -> str:
        return f"restore it; or remove {self.folder}, and give the run a new name"

    @property
    def _file_lists(self) -> list[FileList]:
        """Local files and downloads; they may be links, which are staged as links."""
        listed_in, manifest = str(self.folder / MANIFEST), self.manifest
        return [
            FileList(Path(folder), {e.name: e.entry for e in entries}, listed_in, self._fix, True)
            for folder, entries in ((self.data, manifest.files), (self.hub, manifest.downloads))
        ]


def copy_folders(folder: str | Path, manifest: InputManifest) -> tuple[str, str]:
    """The directories of local files and of downloads in a copy on a node; "" for none."""
    return (
        f"{folder}/{DATA}" if manifest.files else "",
        f"{folder}/{HUB}" if manifest.downloads else "",
    )
