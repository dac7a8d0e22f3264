"""Seal the checkpoints of a program while it runs: when is one complete, and no rank still writing it?"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from forge.checkpoint.manifest import Seal, SealLineage
from forge.checkpoint.sealed import (
    ProgramCheckpoints,
    SealedCheckpoint,
    Signature,
    signature,
)
from forge.core import events
from forge.core.errors import DataError, ForgeError, UnfitError
from forge.core.terminal import say

SCAN_SEC = 1.0
SEAL_SEC = 3600.0  # the digests of a checkpoint of 1 TiB at 300 MB/s


@dataclass
class SealProgress:
    """Progress of the ranks. steps: of their heartbeats; running: seconds that each has been running;
    saved: step of the last checkpoint that each has written its part of."""

    steps: list[int | None]
    running: list[int | None]
    saved: list[int | None]

    @property
    def tells_saves(self) -> bool:
        """Return whether the program reports its saves, so that nothing else counts."""
        return any(step is not None for step in self.saved)

    def has_saved(self, step: int) -> bool:
        """Return whether no rank still writes the checkpoint of this step: all have said that they saved
        it, or, in a program that does not say so, have reported a later step."""
        if self.tells_saves:
            return all(saved_step is not None and saved_step >= step for saved_step in self.saved)
        return bool(self.steps) and all(
            saved_step is not None and saved_step > step for saved_step in self.steps
        )

    def has_run(self, seconds: float, since: SealProgress) -> bool:
        """Return whether every rank has been running for so long since then. A dead rank has not, so that
        its part of a checkpoint is never taken for a complete one."""
        pairs = zip(self.running, since.running, strict=True)
        return all(
            now is not None and then is not None and now - then >= seconds for now, then in pairs
        )


@dataclass
class Candidate:
    """A complete checkpoint that is not sealed yet: its files, and how far the ranks were when they had
    last changed."""

    files: Signature
    since: SealProgress


@dataclass
class Sealer:
    """Watches the checkpoints of one launch, in a thread of the launcher.

    progress: reads how far the ranks are. lineage: what made the checkpoints.
    """

    checkpoints: ProgramCheckpoints
    progress: Callable[[], SealProgress]
    lineage: SealLineage
    keep_last: int | None = None
    on_look: Callable[[SealProgress, bool], None] = lambda *_: None
    """Called with the progress each time the ranks are looked at, and whether this is the last time."""
    _candidates: dict[Path, Candidate] = field(default_factory=dict)
    _sealed: dict[Path, Signature] = field(default_factory=dict)  # as sealed, or at the start
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _warned: set[str] = field(default_factory=set)

    def start(self) -> None:
        with suppress(ForgeError, OSError):  # of the disk: a warning of the first scan
            there = self.checkpoints.by_step().values()
            self._sealed |= {path: files for path in there if (files := signature(path))}
        self._thread = threading.Thread(target=self._run, name="sealer", daemon=True)
        self._thread.start()

    def finish(self, *, orderly: bool) -> None:
        """After the last rank has exited. orderly: all of them by themselves with 0, so that whatever is
        complete may be sealed at once. Raises UnfitError when the checkpoints cannot be read in SEAL_SEC.
        """
        self._ended.set()
        if self._thread:
            self._thread.join(SEAL_SEC)
            if self._thread.is_alive():
                raise UnfitError(
                    f"sealing a checkpoint in {self.checkpoints.paths.root} has not ended"
                    f" {SEAL_SEC / 60:.0f} minutes after the program",
                    cause="the file system of the checkpoints does not answer, or is very slow",
                    fix="try: ls there; rerun the command when it answers: it seals what is complete",
                )
        self._scan(orderly=orderly)

    def _run(self) -> None:
        while not self._ended.wait(SCAN_SEC):
            self._scan(orderly=False)

    def _scan(self, *, orderly: bool) -> None:
        """Seal what has become complete, newest first. Then look at one sealed checkpoint that has
        changed: reading its digests may take an hour, in which another one becomes complete."""
        with self._warning():
            progress = self.progress()
            self.on_look(progress, self._ended.is_set())
            newest_first = [*self.checkpoints.there().items()][::-1]
            for step, path in newest_first:
                with self._warning():
                    if not self.checkpoints.seal_of(path).exists():
                        self._seal_if_due(path, step, signature(path), progress, orderly=orderly)
            sealed = [(step, path) for step, path in newest_first if path in self._sealed]
            # After the end the newest one alone, from which the run resumes: nobody waits for hours.
            for step, path in sealed[: 1 if self._ended.is_set() else None]:
                if files := self._changed(path):
                    old = self._seal_that_holds(path, files)
                    # Else only its times were new, as by `touch`.
                    if self._sealed.get(path) != files:
                        self._seal_if_due(path, step, files, progress, orderly=orderly, old=old)
                    break

    @contextmanager
    def _warning(self) -> Iterator[None]:
        """Say a disk error once: the next scan tries again."""
        try:
            yield
        except (ForgeError, OSError) as err:
            if str(err) not in self._warned:
                self._warned.add(str(err))
                say(f"warning: a checkpoint could not be sealed: {err}")

    def _seal_if_due(
        self,
        path: Path,
        step: int,
        files: Signature,
        progress: SealProgress,
        *,
        orderly: bool,
        old: Seal | None = None,
    ) -> None:
        """Seal a checkpoint that is complete and that no rank still writes. old: as for `_seal`."""
        if not files or not self.checkpoints.is_complete(path, step):
            self._candidates.pop(path, None)
            return
        known = self._candidates.get(path)
        if known is None or known.files != files or None in known.since.running:
            known = self._candidates[path] = Candidate(files, progress)
        is_quiet = orderly or progress.has_run(self.checkpoints.settle_sec, known.since)
        is_due = progress.has_saved(step) or (not progress.tells_saves and is_quiet)
        if old and old.lineage != self.lineage:
            # These ranks tell nothing about files that somebody adds to what others have saved.
            is_due = is_quiet
        if is_due:
            self._seal(path, step, files, old)

    def _changed(self, path: Path) -> Signature:
        """The files of a sealed checkpoint where they have changed since, else (). Where files are gone,
        the program removes the checkpoint; the next pruning takes the seal."""
        sealed, files = self._sealed[path], signature(path)
        is_whole = {name for name, *_ in sealed} <= {name for name, *_ in files}
        return files if is_whole and files != sealed else ()

    def _seal_that_holds(self, path: Path, files: Signature) -> Seal | None:
        """The seal of a checkpoint, where it holds for all files but those that were added. None where
        one has changed: a rank has written on, the checkpoint was not complete. The seal is removed."""
        with suppress(DataError):
            checkpoint = self.checkpoints.open_complete(path)
            seal, is_same = checkpoint.manifest, set(self._sealed[path]) <= set(files)
            if not seal.is_edited and (is_same or not [*checkpoint.file_list.bad_files()]):
                self._sealed[path] = tuple(file for file in files if file[0] in seal.files)
                return seal
        say(f"warning: {path.name} has changed since it was sealed; it will be sealed again")
        self.checkpoints.seal_of(path).unlink(missing_ok=True)
        del self._sealed[path]
        return None

    def _seal(self, path: Path, step: int, files: Signature, old: Seal | None) -> None:
        """old: the seal of all files but those that were added since. It keeps its lineage, and is there
        until the new one replaces it."""
        started = time.monotonic()
        sealed = self.checkpoints.seal(path, step, old.lineage if old else self.lineage, old)
        if sealed is None:
            return
        self._sealed[path] = files  # of before: a rank may write on while the seal is made
        if old:
            say(f"{path.name} is sealed again, with the files that were added to it")
            return
        self._record(sealed, time.monotonic() - started)
        self.checkpoints.prune(self.keep_last)

    def _record(self, checkpoint: SealedCheckpoint, seconds: float) -> None:
        num_bytes = sum(file.bytes for file in checkpoint.manifest.files.values())
        save = events.Save(
            step=checkpoint.step,
            seconds=round(seconds, 3),
            stall=0.0,
            bytes=num_bytes,
            digest=checkpoint.digest,
        )
        events.record(self.checkpoints.paths.events, save)
        say(f"sealed {checkpoint.folder.name}: {num_bytes / 2**20:,.1f} MiB, `latest` points to it")
