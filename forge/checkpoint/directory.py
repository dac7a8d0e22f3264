"""Checkpoint directories: begin, commit, verify, prune, quarantine, and the link `latest`. No torch.

A checkpoint is a directory `step-00000100` with the files of torch.distributed.checkpoint and a
`checkpoint.json` that lists each file with its digest. It is written under a temporary name. The
commit has three steps: a file next to `latest` names the new target, the directory is renamed,
`latest` is swapped. If a crash interrupts the commit after the first step, the next start completes
it (`finish_commit`). A committed directory is never modified; a corrupt one is moved to
`quarantine/`.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from forge.checkpoint.manifest import MANIFEST, Manifest, StoredFile
from forge.core import events, failpoints
from forge.core.errors import DataError, UnfitError
from forge.core.files import digest_file, disk_trouble, fsync_folder
from forge.core.paths import CHECKPOINT_PREFIX, RunPaths, by_step, checkpoint_name, checkpoint_step
from forge.core.records import Damage
from forge.core.terminal import say

TEMPORARY = ".writing-"
DAMAGE = "damage.json"  # in a checkpoint in quarantine
# Room for manifest, index and the event log beside the tensors.
SPARE_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint: its folder and its manifest."""

    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read a folder's manifest. Raises DataError as `Manifest.read` does, and where it is of
        another step than the folder's name says; a folder not named as a step's is not asked."""
        found, named = cls(folder, Manifest.read(folder)), checkpoint_step(folder.name)
        if named is not None and named != found.step:
            raise DataError(
                f"{folder} is named for step {named}, its manifest is of step {found.step}",
                cause="the folder was renamed, or another checkpoint was copied into it",
                fix=f"remove it, or rename it to {checkpoint_name(found.step)} if there is none",
            )
        return found

    @property
    def step(self) -> int:
        return self.manifest.step

    @classmethod
    def open_complete(cls, folder: Path) -> Checkpoint:
        """As `open`; also DataError where a file is missing or cut, and UnfitError when the disk reports
        an error. Contents are not read."""
        with disk_trouble(folder, "read"):
            checkpoint = cls.open(folder)
            checkpoint.check_form()
        return checkpoint

    def check_form(self) -> None:
        """DataError when a file is missing or cut."""
        for name, expected in self.manifest.files.items():
            if bad := self._bad_size(name, expected):
                raise DataError(bad)

    def bad_files(self, threads: int = 4, share: tuple[int, int] = (0, 1)) -> Iterator[str]:
        """What is wrong with the files, one sentence each; reads and digests all of them.

        share: (i, n) looks at every n-th file from the i-th on, for n readers. Raises UnfitError when
        the disk reports an error, which says nothing about the content.
        """
        files = self.manifest.files
        mine = dict(sorted(files.items())[share[0] :: share[1]])
        with disk_trouble(self.folder, "read"), ThreadPoolExecutor(threads) as pool:
            failpoints.reach("load.verify", self.folder)
            yield from filter(None, pool.map(self._bad_file, mine, mine.values()))
        if share[0] == 0:
            extra = {p.name for p in self.folder.iterdir()} - set(files) - {MANIFEST}
            for name in sorted(extra):
                yield f"{name} is not in the manifest"

    def _bad_size(self, name: str, expected: StoredFile) -> str | None:
        path = self.folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected.bytes:
            return f"{name} has {path.stat().st_size} bytes, the manifest says {expected.bytes}"
        return None

    def _bad_file(self, name: str, expected: StoredFile) -> str | None:
        if bad := self._bad_size(name, expected):
            return bad
        if digest_file(self.folder / name) != expected.digest:
            return f"{name} has another digest than the manifest: its content has changed"
        return None


def committed(checkpoints: Path) -> list[Path]:
    """All committed checkpoint folders of a run, oldest first."""
    found = checkpoints.glob(f"{CHECKPOINT_PREFIX}*/{MANIFEST}")
    folders = (path.parent for path in found)
    return sorted((f for f in folders if checkpoint_step(f.name) is not None), key=by_step)


def latest_folder(paths: RunPaths) -> Path | None:
    """The folder that `latest` points to; None for a run without checkpoints.

    Raises DataError when `latest` dangles, is missing or is no link.
    """
    link = paths.latest
    folder = linked(paths)
    if not link.is_symlink() and (_intent(paths) / MANIFEST).is_file():
        folder = _intent(paths).resolve()  # the first commit is between its two renames
    if folder:
        return folder
    there = committed(paths.checkpoints)
    if not link.is_symlink() and not there:
        return None
    raise DataError(
        f"{link} {_trouble(link)}",
        cause="a checkpoint was removed or moved by hand",
        fix=f"ln -sfn {there[-1].name} {link}" if there else f"rm {link}   (starts at step 0)",
    )


def linked(paths: RunPaths) -> Path | None:
    """The folder that `latest` links to; None where it links to none, or is not there.

    Raises DataError where a person or a program has put something else in its place.
    """
    link = paths.latest
    if link.is_symlink():
        return link.resolve() if link.is_dir() else None
    if os.path.lexists(paths.checkpoints) and not paths.checkpoints.is_dir():
        raise DataError(
            f"{paths.checkpoints} is no directory",
            cause="a file or a link to nothing was put there",
            fix=f"move it away: mv {paths.checkpoints} {paths.checkpoints}.old",
        )
    if os.path.lexists(link):
        there = committed(paths.checkpoints)
        relink = f" && ln -s {there[-1].name} {link}" if there else "   (starts at step 0)"
        raise DataError(
            f"{link} is no symbolic link",
            cause="a copy of the run that followed links (cp -L, rsync -L), or an edit",
            fix=f"mv {link} {link}.old{relink}",
        )
    return None


def _trouble(link: Path) -> str:
    if not link.is_symlink():
        return "is gone"
    is_there = os.path.lexists(link.parent / link.readlink())  # a file, or links in a circle
    return f"points to {link.readlink()}, which is {'no directory' if is_there else 'not there'}"


# --- saving ----------------------------------------------------------------------------------------


def begin(paths: RunPaths, step: int, size: int = 0) -> Path:
    """An empty temporary folder for the checkpoint of this step. Rank 0.

    Raises UnfitError when fewer than `size` bytes, and a little more, are free for it.
    """
    folder = temporary_folder(paths, step)
    with disk_trouble(folder):
        failpoints.reach("save.begin", folder)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        free = shutil.disk_usage(folder).free
    needed = size + SPARE_BYTES
    if free < needed:
        raise UnfitError(
            f"the checkpoint of step {step} needs {needed / 2**20:,.1f} MiB in {paths.checkpoints},"
            f" {free / 2**20:,.1f} MiB are free",
            cause="the disk is almost full",
            fix="free space and rerun the same command; what was committed before is intact",
        )
    return folder


def temporary_folder(paths: RunPaths, step: int) -> Path:
    """Where the checkpoint of this step is written before it is committed."""
    return paths.checkpoints / f"{TEMPORARY}{checkpoint_name(step)}"


def commit(
    paths: RunPaths,
    folder: Path,
    manifest: Manifest,
    keep_last: int,
    keep_every: int | None = None,
) -> Checkpoint:
    """Make a written temporary folder the newest checkpoint, durably, then prune. Rank 0.

    Its files are on disk already: whoever wrote one has fsynced it.
    """
    final = paths.checkpoints / checkpoint_name(manifest.step)
    with disk_trouble(final):
        failpoints.reach("commit.manifest", folder)
        if lost := [name for name in manifest.files if not (folder / name).is_file()]:
            raise UnfitError(
                f"{folder} has lost {', '.join(lost)}: nothing was committed",
                cause="it was removed by hand, or by another start of this run",
                fix="see that one command trains this run, and give it again",
            )
        manifest = manifest.write(folder)
        failpoints.reach("commit.intent", folder)
        intent = _intent(paths)
        intent.unlink(missing_ok=True)
        intent.symlink_to(final.name)
        if final.exists():  # the same step again, after a person went back to an older `latest`
            final.rename(paths.checkpoints / f"{TEMPORARY}replaced-{final.name}")
        failpoints.reach("commit.rename", folder)
        folder.rename(final)
        fsync_folder(paths.checkpoints)
        failpoints.reach("commit.latest", final)
        intent.replace(paths.latest)
        fsync_folder(paths.checkpoints)
    failpoints.reach("commit.done", final)
    prune(paths, keep_last, keep_every)
    return Checkpoint(final, manifest)


def _intent(paths: RunPaths) -> Path:
    """The new `latest` of a commit under way. It tells a commit that was cut off from a person who
    has pointed `latest` to an older checkpoint."""
    return paths.checkpoints / f"{TEMPORARY}latest"


def finish_commit(paths: RunPaths) -> None:
    """Swap `latest` where a commit was cut off after its folder had its name. Under the lock only."""
    intent = _intent(paths)
    if not intent.is_symlink():
        return
    with disk_trouble(intent):
        replaced = paths.checkpoints / f"{TEMPORARY}replaced-{intent.readlink()}"
        final = paths.checkpoints / intent.readlink()
        if replaced.is_dir() and not final.exists():
            replaced.rename(final)  # cut off between the two renames: the old one stands again
            intent.unlink()
        elif (final / MANIFEST).is_file():
            say(f"finishing the commit of {final}")
            intent.replace(paths.latest)
        else:
            intent.unlink()
        fsync_folder(paths.checkpoints)


def prune(paths: RunPaths, keep_last: int, keep_every: int | None = None) -> None:
    """Remove all but the newest `keep_last` checkpoints and those at multiples of `keep_every`.

    Never the one behind `latest`, nor newer ones, which a person who has set `latest` back has left
    behind. What cannot be removed stays: the next save tries again.
    """
    folder = linked(paths)
    newest = (checkpoint_step(folder.name) or 0) if folder else 0
    line = [f for f in committed(paths.checkpoints) if _step_of(f) <= newest]
    for folder in line[:-keep_last]:
        if keep_every and _step_of(folder) % keep_every == 0:
            continue
        try:
            _remove(folder)
        except OSError as err:
            say(f"warning: cannot remove the old checkpoint {folder}: {err}")
    clean(paths)


def _step_of(folder: Path) -> int:
    step = checkpoint_step(folder.name)
    assert step is not None
    return step


def _remove(folder: Path) -> None:
    # The rename first: a removal that is cut off must not leave half a checkpoint under its name.
    failpoints.reach("prune.rename", folder)
    doomed = folder.with_name(f"{TEMPORARY}pruned-{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    failpoints.reach("prune.remove", doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def clean(paths: RunPaths) -> None:
    """Remove what a killed save or prune left behind. Under the run's lock only."""
    for leftover in paths.checkpoints.glob(f"{TEMPORARY}*"):
        if leftover.is_symlink():
            leftover.unlink()
        else:
            shutil.rmtree(leftover, ignore_errors=True)


# --- `latest` and corrupt checkpoints --------------------------------------------------------------


def mend_latest(paths: RunPaths) -> Path | None:
    """The folder that `latest` points to, `latest` mended where it points to nothing; None when no
    checkpoint is left. Under the run's lock only. Raises DataError as `linked` does."""
    link = paths.latest
    if folder := linked(paths):
        return folder
    there = fallbacks(paths)
    if not there:
        if link.is_symlink():
            say(f"warning: {link} {_trouble(link)}, and no checkpoint is left")
            with disk_trouble(link):
                link.unlink()
        return None
    say(f"warning: {link} {_trouble(link)}: using {there[0].name}")
    _point_latest(paths, there[0])
    return there[0]


def fallbacks(paths: RunPaths, name: str | None = None) -> list[Path]:
    """Committed folders in the order in which training falls back to them from the checkpoint `name`,
    by default the one that `latest` names: older ones, the newest first; then newer ones."""
    link = paths.latest
    if name is None and link.is_symlink():
        name = link.readlink().name
    step = checkpoint_step(name or "")
    there = committed(paths.checkpoints)[::-1]
    older = [folder for folder in there if step is None or _step_of(folder) < step]
    return older + [folder for folder in there if folder not in older]


def _point_latest(paths: RunPaths, folder: Path) -> None:
    """Swap the relative symlink `latest` by rename, so that it always resolves."""
    temporary = paths.checkpoints / f"{TEMPORARY}mended-latest"
    with disk_trouble(temporary):
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(folder.name)
        temporary.replace(paths.latest)
        fsync_folder(paths.checkpoints)


def quarantine(paths: RunPaths, folder: Path, reasons: Sequence[str]) -> Path:
    """Move a damaged checkpoint out of the way, with its reasons; where it lies now.

    `latest`, if it pointed there, points to the next older one, or is removed. Under the run's
    lock only, on one rank. Raises UnfitError when the disk does not let it.
    """
    place = paths.quarantine / folder.name
    for number in itertools.count(2):
        if not place.exists():
            break
        place = paths.quarantine / f"{folder.name}.{number}"
    followers = [other for other in fallbacks(paths, folder.name) if other != folder]
    was_latest = linked(paths) == folder.resolve()
    with disk_trouble(place):
        paths.quarantine.mkdir(exist_ok=True)
        folder.rename(place)
        if was_latest and followers:
            _point_latest(paths, followers[0])
        elif was_latest:
            paths.latest.unlink()
        fsync_folder(paths.checkpoints)
    events.record(paths.events, events.Quarantine(checkpoint=folder.name, reasons=list(reasons)))
    with suppress(UnfitError):
        Damage(reasons=list(reasons)).write(place / DAMAGE)
    say(f"warning: checkpoint {folder} is damaged: {'; '.join(reasons)}")
    following = "no other checkpoint is left"
    if not was_latest:
        following = "latest stays as it is"
    elif followers:
        following = f"using {followers[0].name}"
    say(f"warning: it was moved to {place}; {following}")
    return place
