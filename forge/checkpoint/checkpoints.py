"""A checkpoint, and the checkpoints of a run, whichever training program saves them. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from forge.core.file_list import FileList
from forge.core.paths import RunPaths


class SavedCheckpoint(Protocol):
    """A complete checkpoint, with the size and digest of each file."""

    @property
    def folder(self) -> Path:
        """Its directory, or the file that it is."""

    @property
    def step(self) -> int: ...

    @property
    def digest(self) -> str:
        """Over the digests of all its files."""

    @property
    def file_list(self) -> FileList: ...

    def bad_files(self) -> Iterator[str]:
        """A sentence for each file that is missing, corrupt or not listed; digests all files. Raises
        UnfitError when the disk reports an error, which says nothing about the content."""


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
