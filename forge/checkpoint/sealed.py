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
from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from forge.checkpoint import directory
from forge.checkpoint.manifest import Artifact, Code, StoredFile
from forge.core.config import ResolvedConfig
from forge.core.errors import (
    USE_THAT_VERSION,
    ConfigError,
    DataError,
    OtherFormat,
)
from forge.core.file_list import FileList, described
from forge.core.files import (
    MAX_JSON_BYTES,
    canonical,
    digest_bytes,
    disk_trouble,
    fsync_folder,
    is_file_below,
    relative_path,
)
from forge.core.paths import RunPaths
from forge.core.program_settings import STEP, Checkpoints
from forge.core.provenance import code, config_digest
from forge.core.records import Record
from forge.core.terminal import say

SEAL = ".forge.json"

# Path in a checkpoint, or "" for a checkpoint that is a file.
SealedName = Annotated[str, AfterValidator(lambda name: name and relative_path(name))]
# Size and time of last change of each file of a checkpoint.
Signature = tuple[tuple[str, int, int], ...]


class SealLineage(BaseModel):
    """Artifacts and code that made a checkpoint of a program."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    config_digest: str
    command: list[str]
    source: Artifact | None
    """The directory of the program, and the digest of its files."""
    inputs: Artifact | None
    """Id and digest of its input files."""
    world_size: int
    code: Code
    """Version of Forge."""

    @classmethod
    def of(
        cls, config: ResolvedConfig, *, source_digest: str, inputs_digest: str, world_size: int
    ) -> Self:
        """The lineage of the checkpoints that this run saves now, with this installation of Forge.
        Digests: of the program's directory and of its input files, where it has them."""
        program = config.program
        assert program
        return cls(
            run=config.run,
            config_digest=config_digest(config),
            command=program.command,
            source=_artifact(program.source, source_digest),
            inputs=_artifact(config.ids.inputs, inputs_digest),
            world_size=world_size,
            code=Code(**code()),
        )


def _artifact(name: str | None, digest: str) -> Artifact | None:
    return Artifact(id=name, digest=digest) if name else None


class Seal(Record):
    """NAME.forge.json: a complete checkpoint of a program."""

    FIX: ClassVar[str] = USE_THAT_VERSION
    MAX_BYTES: ClassVar[int] = MAX_JSON_BYTES

    step: int
    files: dict[SealedName, StoredFile]
    """Files by their path in the checkpoint; "" for a checkpoint that is a file."""
    lineage: SealLineage
    digest: str
    """blake3 of step and files."""


@dataclass(frozen=True)
class SealedCheckpoint:
    """A checkpoint and its seal."""

    path: Path
    seal: Seal

    @property
    def step(self) -> int:
        return self.seal.step

    def bad_files(self) -> Iterator[str]:
        """A sentence for each file that is missing, changed or not in the seal; digests all files.

        Raises UnfitError when the disk reports an error, which says nothing about the content.
        """
        if self.seal.digest != _digest(self.seal.step, self.seal.files):
            yield "its seal was edited"
        yield from self.file_list.bad_files()
        with disk_trouble(self.path, "read"):
            yield from self.file_list.extra(_names(self.path))

    @property
    def file_list(self) -> FileList:
        entries = {name: file.entry for name, file in self.seal.files.items()}
        return FileList(self.path, entries, listed_in="its seal")


@dataclass(frozen=True)
class ProgramCheckpoints:
    """The checkpoints of one run. Changes are made under the run's lock only, by its launcher."""

    paths: RunPaths
    settings: Checkpoints
    world_size: int

    # --- recognizing ---

    def there(self) -> dict[int, Path]:
        """Everything that is named as a checkpoint, by step, whether complete or not. Raises DataError
        as `directory.refuse_link`."""
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
        if link.is_symlink() and link.exists() and link.readlink().name not in self._names():
            raise ConfigError(
                f"{link} points to {link.readlink()}, which is not named like"
                f" {self.settings.pattern} (program.checkpoints.pattern)",
                cause="the pattern was changed after the run had begun, or the program was replaced",
                fix="restore the pattern, or give the changed run a new name",
            )

    def _names(self) -> set[str]:
        return {path.name for path in self.there().values()}

    def is_complete(self, path: Path, step: int) -> bool:
        """Whether all marks of a complete checkpoint are there."""
        folder = path if path.is_dir() else path.parent
        for mark in self.settings.complete:
            ranks = range(self.world_size) if "{rank}" in mark else range(1)
            for rank in ranks:
                name = mark.replace(STEP, str(step)).replace("{rank}", str(rank))
                if next(folder.glob(name), None) is None:
                    return False
        return True

    def seal_of(self, path: Path) -> Path:
        return path.with_name(path.name + SEAL)

    def sealed(self) -> list[SealedCheckpoint]:
        """All sealed checkpoints, newest first; those with an unreadable seal are left out. Raises
        OtherFormat for a seal of another version of Forge."""
        checkpoints = []
        for path in self.there().values():
            try:
                if self.seal_of(path).exists():
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

    def check_still_there(self, step: int) -> None:
        """As `resume.check_still_there`; `latest` is the program's own."""
        paths, newest = self.paths, self.latest()
        if newest is None or newest.step < step:
            raise DataError(
                f"the checkpoint of step {step} in {paths.checkpoints} is missing, or its seal",
                fix=directory.restore_or_train_again(paths),
            )
        try:
            newest.file_list.check_sizes()
        except DataError as err:
            raise DataError(err.what, fix=f"forge validate {paths.root} --all") from None

    # --- sealing ---

    def seal(self, path: Path, step: int, lineage: SealLineage) -> SealedCheckpoint | None:
        """Seal a checkpoint durably and point `latest` to the newest sealed one; None where it changed or
        was removed meanwhile. Raises UnfitError when the disk cannot be written, DataError for the name
        of a file that no seal may have."""
        before = signature(path)
        try:
            with disk_trouble(path, "read"):
                files = {
                    name: StoredFile(bytes=size, digest=digest)
                    for name, size, digest in described(path, _names(path), sync=True)
                }
                for folder in {(path / name).parent for name in files if name}:
                    fsync_folder(folder)
        except FileNotFoundError:
            return None
        if not before or signature(path) != before:
            return None
        try:
            seal = Seal(step=step, files=files, lineage=lineage, digest=_digest(step, files))
        except ValidationError as err:
            raise DataError(
                f"{path} cannot be sealed: {err.errors()[0]['msg']}",
                cause="a file in it has a line break or another control character in its name",
                fix="let the program give it another name",
            ) from None
        seal.write(self.seal_of(path))
        self._point_latest(self.sealed()[0].path)
        return SealedCheckpoint(path, seal)

    # --- before a launch ---

    def newest_verified(self) -> SealedCheckpoint | None:
        """The newest sealed checkpoint, all digests verified; `latest` points to it.

        Everything newer that is corrupt, incomplete or was never sealed is moved to quarantine, so that a
        program that looks for its newest checkpoint finds this one. Raises UnfitError, OtherFormat.
        """
        known = {checkpoint.path: checkpoint for checkpoint in self.sealed()}
        for path in reversed(self.there().values()):
            reasons = [
                "it was never sealed: the program ended before its save was known to be complete"
            ]
            if self.seal_of(path).exists():
                checkpoint = known.get(path)
                reasons = (
                    list(checkpoint.bad_files()) if checkpoint else ["its seal cannot be read"]
                )
                if checkpoint and not reasons:
                    self._point_latest(path)
                    return checkpoint
            self._quarantine(path, reasons)
        with disk_trouble(self.paths.latest):
            self.paths.latest.unlink(missing_ok=True)
        return None

    def _point_latest(self, path: Path) -> None:
        link = self.paths.latest
        if not link.is_symlink() or link.readlink() != Path(path.name):
            directory.point_latest(self.paths, path)

    def _quarantine(self, path: Path, reasons: Sequence[str]) -> None:
        def move(new: Path) -> Path:
            path.rename(new)
            if (seal := self.seal_of(path)).exists():
                seal.rename(self.seal_of(new))
            return new.with_name(f"{new.name}.{directory.DAMAGE}")

        new = directory.move_to_quarantine(self.paths, path, reasons, move)
        say(f"warning: checkpoint {path} is not used: {'; '.join(reasons)}")
        say(f"warning: moved {path.name} to {new}")

    # --- retention ---

    def prune(self, keep_last: int | None) -> None:
        """Remove all but the newest `keep_last` sealed checkpoints, and seals without a checkpoint."""
        for checkpoint in self.sealed()[keep_last:] if keep_last else []:
            directory.remove(checkpoint.path)
        for seal in self.paths.checkpoints.glob(f"*{SEAL}"):
            if not os.path.lexists(str(seal).removesuffix(SEAL)):
                seal.unlink(missing_ok=True)


def signature(path: Path) -> Signature:
    """Name, size and time of change of each file of a checkpoint, to see later whether one has changed;
    () where the checkpoint is gone, or a file disappears meanwhile."""
    signs = []
    try:
        for name in _names(path):
            status = (path / name if name else path).stat()
            signs.append((name, status.st_size, status.st_mtime_ns))
    except OSError:
        return ()
    return tuple(signs)


def _names(path: Path) -> Iterator[str]:
    """Paths of the files in a checkpoint, sorted; "" for a checkpoint that is a file. Without links that
    lead out of it: a checkpoint from elsewhere could have one to any file."""
    if path.is_file():
        yield ""
        return
    for file in sorted(path.rglob("*")):
        if file.is_file() and (not file.is_symlink() or is_file_below(file, path)):
            yield str(file.relative_to(path))


def _digest(step: int, files: dict[str, StoredFile]) -> str:
    return digest_bytes(canonical([step, {n: f.model_dump(mode="json") for n, f in files.items()}]))
