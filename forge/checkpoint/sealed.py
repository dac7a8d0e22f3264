"""Checkpoints of other training programs: recognize, seal, verify, prune. No torch.

A seal is a file beside a checkpoint, `checkpoint-500.forge.json`, with size and digest of each file of
the checkpoint and what made it. Only a sealed checkpoint whose digests are right is resumed from, and
counts towards the goal; before each launch `latest` points to it. The checkpoint itself is never written
to.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from forge.checkpoint import directory
from forge.checkpoint.checkpoints import SavedCheckpoint
from forge.checkpoint.manifest import Seal, SealLineage, StoredFile, names_in, seal_digest
from forge.core.errors import ConfigError, DataError, OtherFormat
from forge.core.file_list import described
from forge.core.files import disk_trouble, fsync_folder
from forge.core.paths import RunPaths
from forge.core.program_settings import STEP, Checkpoints
from forge.core.terminal import say

SEAL = ".forge.json"
NEVER_SEALED = "it was never sealed: the program ended before its save was known to be complete"

# Size and time of last change of each file of a checkpoint.
Signature = tuple[tuple[str, int, int], ...]
SealedCheckpoint = SavedCheckpoint[Seal]


@dataclass(frozen=True)
class ProgramCheckpoints:
    """The checkpoints of one run; none where the config does not say how they are named. Changes are
    made under the run's lock only."""

    paths: RunPaths
    settings: Checkpoints | None
    world_size: int = 1  # counts for what is not sealed yet

    # --- recognizing ---

    def there(self) -> dict[int, Path]:
        """Everything that is named as a checkpoint, by step, whether complete or not. Raises DataError
        as `directory.refuse_link`."""
        if self.settings is None:
            return {}
        directory.refuse_link(self.paths.checkpoints)
        before, _, after = self.settings.pattern.partition(STEP)
        named = re.compile(f"{re.escape(before)}([0-9]+){re.escape(after)}")
        by_step: dict[int, Path] = {}
        with suppress(FileNotFoundError):
            for path in self.paths.checkpoints.iterdir():
                if (match := named.fullmatch(path.name)) and not path.is_symlink():
                    by_step[int(match[1])] = path
        return dict(sorted(by_step.items()))

    def refuse_other_pattern(self) -> None:
        """ConfigError where `latest` points to a checkpoint that the pattern does not name: the run would
        silently begin afresh."""
        link = self.paths.latest
        if self.settings is None or not (link.is_symlink() and link.exists()):
            return
        if link.readlink().name not in self._names():
            raise ConfigError(
                f"{link} points to {link.readlink()}, which is not named like"
                f" {self.settings.pattern} (program.checkpoints.pattern)",
                cause="the pattern was changed after the run had begun, or the program was replaced",
                fix="restore the pattern, or give the changed run a new name",
            )

    def _names(self) -> set[str]:
        return {path.name for path in self.there().values()}

    def is_complete(self, path: Path, step: int) -> bool:
        """Return whether all marks of a complete checkpoint are there."""
        folder = path if path.is_dir() else path.parent
        for mark in self.settings.complete if self.settings else ():
            ranks = range(self.world_size) if "{rank}" in mark else range(1)
            for rank in ranks:
                name = mark.replace(STEP, str(step)).replace("{rank}", str(rank))
                if next(folder.glob(name), None) is None:
                    return False
        return True

    @property
    def settle_sec(self) -> float:
        """A checkpoint that has not changed for this long is complete."""
        return self.settings.settle_sec if self.settings else 0.0

    def seal_of(self, path: Path) -> Path:
        return path.with_name(path.name + SEAL)

    def by_step(self) -> dict[int, Path]:
        """With a seal, which may be unreadable."""
        return {step: p for step, p in self.there().items() if self.seal_of(p).exists()}

    def open_complete(self, folder: Path) -> SealedCheckpoint:
        checkpoint = SealedCheckpoint(folder, Seal.read(self.seal_of(folder)))
        checkpoint.file_list.check_sizes()
        return checkpoint

    def sealed(self) -> list[SealedCheckpoint]:
        """All sealed checkpoints, newest first; those with an unreadable seal are left out. Raises
        OtherFormat for a seal of another version of Forge."""
        checkpoints = []
        for path in self.by_step().values():
            try:
                checkpoints.append(SealedCheckpoint(path, Seal.read(self.seal_of(path))))
            except OtherFormat:
                raise
            except DataError:
                continue
        return checkpoints[::-1]

    def latest(self) -> SealedCheckpoint | None:
        """The newest sealed checkpoint; None without one. Raises OtherFormat.

        The link `latest` does not decide: some programs move one of that name themselves, to
        checkpoints that are not sealed yet.
        """
        return next(iter(self.sealed()), None)

    def trouble_of_latest(self) -> str:
        return ""  # the link is repaired before each launch

    def check_still_there(self, step: int) -> None:
        """Check, whatever `latest` points to, which is the program's own."""
        if self.settings is None:
            return
        paths, newest = self.paths, self.latest()
        if newest is None or newest.step < step:
            raise DataError(
                f"the checkpoint of step {step} in {paths.checkpoints} is missing, or its seal",
                fix=directory.restore_or_retrain(paths),
            )
        try:
            newest.file_list.check_sizes()
        except DataError as err:
            raise DataError(err.what, fix=f"forge validate {paths.root} --all") from None

    # --- sealing ---

    def seal(
        self, path: Path, step: int, lineage: SealLineage, old: Seal | None = None
    ) -> SealedCheckpoint | None:
        """Seal a checkpoint durably and point `latest` to the newest sealed one; None where it changed or
        was removed meanwhile. old: a seal of it, whose digests count for its files: what has changed
        since then is still found. Raises UnfitError when the disk cannot be written, DataError for the
        name of a file that no seal may have."""
        before = signature(path)
        try:
            with disk_trouble(path, "read"):
                known = old.files if old else {}
                names = [name for name in names_in(path) if name not in known]
                files = known | {
                    name: StoredFile(bytes=size, digest=digest)
                    for name, size, digest in described(path, names, sync=True)
                }
                for folder in {(path / name).parent for name in files if name}:
                    fsync_folder(folder)
        except FileNotFoundError:
            return None
        if not before or signature(path) != before:
            return None
        try:
            seal = Seal(step=step, files=files, lineage=lineage, digest=seal_digest(step, files))
        except ValidationError as err:
            raise DataError(
                f"{path} cannot be sealed: {err.errors()[0]['msg']}",
                cause="a file in it has a line break or another control character in its name",
                fix="let the program give it another name",
            ) from None
        seal.write(self.seal_of(path))
        self._point_latest(self.sealed()[0].folder)
        return SealedCheckpoint(path, seal)

    # --- before a launch ---

    def finish_launch(self) -> None:
        for path in reversed(self.there().values()):
            if self.seal_of(path).exists():
                return
            self.quarantine(path, [NEVER_SEALED])

    def repaired_latest(self) -> SealedCheckpoint | None:
        """The newest sealed checkpoint, all digests verified; `latest` points to it.

        Everything newer that is corrupt, incomplete or was never sealed is moved to quarantine, so that a
        program that looks for its newest checkpoint finds this one. Raises UnfitError, OtherFormat.
        """
        if self.settings is None:
            return None
        known = {checkpoint.folder: checkpoint for checkpoint in self.sealed()}
        self._remove_lone_seals()
        for path in reversed(self.there().values()):
            checkpoint, reasons = known.get(path), ["its seal cannot be read"]
            if checkpoint:
                reasons = list(checkpoint.bad_files())
            elif not self.seal_of(path).exists():
                reasons = [NEVER_SEALED]
            if checkpoint and not reasons:
                self._point_latest(path)
                return checkpoint
            self.quarantine(path, reasons)
        if self.paths.latest.is_symlink():
            with disk_trouble(self.paths.latest):
                self.paths.latest.unlink(missing_ok=True)
        return None

    def _point_latest(self, path: Path) -> None:
        link = self.paths.latest
        if os.path.lexists(link) and not link.is_symlink():
            return  # the program's own, as the file in which DeepSpeed has the name of its newest one
        if not link.is_symlink() or link.readlink() != Path(path.name):
            directory.point_latest(self.paths, path)

    def quarantine(self, path: Path, reasons: Sequence[str]) -> Path:
        """Move a checkpoint to quarantine/ with its seal, its reasons beside it; the new path."""

        def move(new: Path) -> Path:
            path.rename(new)
            if (seal := self.seal_of(path)).exists():
                seal.rename(self.seal_of(new))
            return new.with_name(f"{new.name}.{directory.DAMAGE}")

        new = directory.move_to_quarantine(self.paths, path, reasons, move)
        say(f"warning: checkpoint {path} is not used: {'; '.join(reasons)}")
        say(f"warning: moved {path.name} to {new}")
        return new

    def quarantined(self) -> Iterator[tuple[Path, Path]]:
        records = self.paths.quarantine.glob(f"*.{directory.DAMAGE}")
        for record in sorted(records, reverse=True):
            yield record.with_name(record.name.removesuffix(f".{directory.DAMAGE}")), record

    # --- retention ---

    def prune(self, keep_last: int | None) -> None:
        """Remove all but the newest `keep_last` sealed checkpoints, and seals without a checkpoint."""
        for checkpoint in self.sealed()[keep_last:] if keep_last else []:
            directory.remove(checkpoint.folder)
        self._remove_lone_seals()

    def _remove_lone_seals(self) -> None:
        """Remove seals of checkpoints that are gone: the next one of that name would not be sealed."""
        with disk_trouble(self.paths.checkpoints):
            for seal in self.paths.checkpoints.glob(f"*{SEAL}"):
                if not os.path.lexists(str(seal).removesuffix(SEAL)):
                    seal.unlink(missing_ok=True)


def signature(path: Path) -> Signature:
    """Name, size and time of change of each file of a checkpoint, to see later whether one has changed;
    () where the checkpoint is gone, or a file disappears meanwhile."""
    signs = []
    try:
        for name in names_in(path):
            status = (path / name if name else path).stat()
            signs.append((name, status.st_size, status.st_mtime_ns))
    except OSError:
        return ()
    return tuple(signs)
