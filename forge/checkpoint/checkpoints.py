"""A checkpoint, and the checkpoints of a run, whichever training program saves them. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from forge.checkpoint.manifest import Manifest, Seal
from forge.core import failpoints
from forge.core.errors import DataError, UnfitError
from forge.core.file_list import FileList
from forge.core.files import disk_trouble
from forge.core.paths import RunPaths

Form = TypeVar("Form", bound=Manifest | Seal)


@dataclass(frozen=True)
class SavedCheckpoint(Generic[Form]):
    """A complete checkpoint: its directory, or the file that it is, and its manifest, which is the seal
    of one of another program."""

    folder: Path
    manifest: Form

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def digest(self) -> str:
        """Over the digests of all its files."""
        return self.manifest.digest_in(self.folder)

    @property
    def file_list(self) -> FileList:
        entries = {name: file.entry for name, file in self.manifest.files.items()}
        return FileList(self.folder, entries, self.manifest.LISTED_IN)

    def bad_files(self, share: tuple[int, int] = (0, 1)) -> Iterator[str]:
        """A sentence for each file that is missing, corrupt or not listed; digests all files.

        share: (i, n) checks every n-th file from the i-th on, for n readers. Raises UnfitError when
        the disk reports an error, which says nothing about the content.
        """
        with disk_trouble(self.folder, "read"):
            failpoints.reach("load.verify", self.folder)
        if self.manifest.is_edited:
            yield f"{self.manifest.LISTED_IN} was edited"
        yield from self.file_list.bad_files(share)
        if share[0] == 0:
            with disk_trouble(self.folder, "read"):
                there = self.manifest.names_in(self.folder)
            yield from self.file_list.extra(there)


class Pruned(DataError):
    """A checkpoint was removed while it was read."""


@contextmanager
def not_pruned(checkpoint: SavedCheckpoint) -> Iterator[None]:
    """Raise Pruned where the run, which is training, prunes the checkpoint while it is read. A program
    may do so file by file, and its directory is left for as long as that takes."""
    with not_removed(checkpoint.folder):
        yield


@contextmanager
def not_removed(folder: Path) -> Iterator[None]:
    """Raise Pruned as `not_pruned` does, for the directory of a checkpoint."""
    try:
        yield
    except (DataError, UnfitError, FileNotFoundError) as err:
        is_gone = isinstance(err, FileNotFoundError) and Path(str(err.filename)).is_relative_to(
            folder
        )
        if folder.exists() and not is_gone:
            raise
        raise Pruned(
            f"{folder} was removed while it was read",
            cause="the run is training and keeps only its newest checkpoints",
            fix="rerun the command, or raise train.keep_last (program.keep_last)",
        ) from None


class RunCheckpoints(Protocol):
    """The checkpoints of one run."""

    @property
    def paths(self) -> RunPaths: ...

    def latest(self) -> SavedCheckpoint | None:
        """The newest checkpoint that counts; None without one. Raises DataError."""

    def check_still_there(self, step: int) -> None:
        """DataError, with what to do, where the checkpoint at which a run has ended is missing or
        incomplete. Reads no digests."""

    def by_step(self) -> dict[int, Path]:
        """All checkpoints, oldest first, whether valid or not."""

    def open_complete(self, folder: Path) -> SavedCheckpoint:
        """DataError for an incomplete checkpoint, UnfitError when the disk reports an error. No contents
        are read."""

    def trouble_of_latest(self) -> str:
        """Trouble with the link `latest`; "" where it is right, or decides nothing."""

    def quarantined(self) -> Iterator[tuple[Path, Path]]:
        """Each checkpoint in quarantine with the record of its reasons, which may be missing."""

    # --- under the run's lock ---

    def finish_launch(self) -> None:
        """Complete or move away what an interrupted launch was saving."""

    def quarantine(self, folder: Path, reasons: Sequence[str]) -> Path:
        """Move a corrupt checkpoint to quarantine/, with its reasons; the new path."""

    def repaired_latest(self) -> SavedCheckpoint | None:
        """The checkpoint that training resumes from, to which `latest` points; None when none is left.
        Those that are not complete are moved to quarantine."""
