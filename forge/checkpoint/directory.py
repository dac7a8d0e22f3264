"""Checkpoint directories: begin, commit, verify, prune, quarantine, and the link `latest`. No torch.

A checkpoint is a directory `step-00000100` with the files of torch.distributed.checkpoint and a
`checkpoint.json` that lists each file with its digest. It is written under a temporary name. The
commit has three steps: a link next to `latest` points to the new target, the directory is renamed,
`latest` is replaced by that link. If a crash interrupts the commit after the rename, the next start
completes it (`finish_commit`). A committed directory is never modified; a corrupt one is moved to
`quarantine/`.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from forge.checkpoint.checkpoints import SavedCheckpoint
from forge.checkpoint.manifest import MANIFEST, Manifest
from forge.core import events, failpoints
from forge.core.config import ResolvedConfig, apply_overrides, as_recorded, checked
from forge.core.errors import DataError, DiskFull, UnfitError
from forge.core.file_list import FileEntry, FileList
from forge.core.files import digest_file, disk_trouble, fsync_folder, plain_name
from forge.core.paths import CHECKPOINT_PREFIX, RunPaths, by_step, checkpoint_name, checkpoint_step
from forge.core.records import Damage
from forge.core.terminal import say

TEMPORARY = ".writing-"
DAMAGE = "damage.json"  # in a checkpoint in quarantine
# Free space for manifest, index and event log, besides the tensors.
SPARE_BYTES = 4 * 2**20


class Checkpoint(SavedCheckpoint[Manifest]):
    """A committed checkpoint of Forge's own trainer."""

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read the manifest. Raises DataError as `Manifest.read` does, and where the directory is named
        for another step than that of the manifest."""
        checkpoint, named = cls(folder, Manifest.read(folder)), checkpoint_step(folder.name)
        if named is not None and named != checkpoint.step:
            raise DataError(
                f"{folder} is named for step {named}, its manifest is of step {checkpoint.step}",
                cause="the directory was renamed, or another checkpoint was copied into it",
                fix=f"remove it, or rename it to {checkpoint_name(checkpoint.step)} if there is none",
            )
        return checkpoint

    def config(self, overrides: dict[str, Any]) -> ResolvedConfig:
        """The config that made it, with other values for some keys. Raises ConfigError for one that this
        version of Forge refuses."""
        recorded = as_recorded(self.manifest.lineage.config.to_json())
        values = apply_overrides(recorded, overrides)
        return checked(ResolvedConfig, values, str(self.folder))

    @classmethod
    def open_complete(cls, folder: Path) -> Checkpoint:
        """Open a checkpoint as `open` does; also DataError where a file is missing or truncated, and
        UnfitError when the disk reports an error. File contents are not read."""
        with disk_trouble(folder, "read"):
            checkpoint = cls.open(folder)
            checkpoint.file_list.check_sizes()
        return checkpoint

    @property
    def whole_list(self) -> FileList:
        """Also with the manifest itself, as it is now."""
        path = self.folder / MANIFEST
        manifest = FileEntry(path.stat().st_size, digest_file(path))
        return FileList(self.folder, {**self.file_list.entries, MANIFEST: manifest})


def committed(checkpoints: Path) -> list[Path]:
    """All committed checkpoint directories of a run, oldest first."""
    manifests = checkpoints.glob(f"{CHECKPOINT_PREFIX}*/{MANIFEST}")
    folders = (path.parent for path in manifests if not path.parent.is_symlink())
    return sorted((f for f in folders if checkpoint_step(f.name) is not None), key=by_step)


def steps_there(checkpoints: Path) -> str:
    """`the steps 50, 100`: of the committed checkpoints of a run, for messages."""
    steps = ", ".join(str(_step_of(folder)) for folder in committed(checkpoints))
    return f"the steps {steps}" if steps else "no checkpoint"


def folders(parent: Path) -> list[Path]:
    """Directories that are named as checkpoints, oldest first, with or without a manifest."""
    there = parent.glob(f"{CHECKPOINT_PREFIX}*")
    return sorted((f for f in there if f.is_dir() and not f.is_symlink()), key=by_step)


def latest_folder(paths: RunPaths) -> Path | None:
    """The directory that `latest` points to; None for a run without checkpoints.

    Raises DataError when `latest` dangles, is missing or is not a link.
    """
    link = paths.latest
    if folder := linked(paths):
        return folder
    intent = _intent(paths)
    if not link.is_symlink() and intent.is_symlink() and (target_of(intent) / MANIFEST).is_file():
        return target_of(intent).resolve()  # the run's first commit is between its two renames
    there = committed(paths.checkpoints)
    if not link.is_symlink() and not there:
        return None
    raise DataError(
        f"{link} {_trouble(link)}",
        cause="a checkpoint was removed or moved by hand",
        fix=f"ln -sfn {there[-1].name} {link}" if there else f"rm {link}   (starts at step 0)",
    )


def linked(paths: RunPaths) -> Path | None:
    """The directory that `latest` links to; None where the link dangles or does not exist.

    Raises DataError where something other than a link has its name, as `target_of` where it leads out
    of this directory, and as `refuse_link`.
    """
    link = paths.latest
    refuse_link(paths.checkpoints)
    if link.is_symlink():
        folder = target_of(link)
        return folder.resolve() if folder.is_dir() else None
    if os.path.lexists(paths.checkpoints) and not paths.checkpoints.is_dir():
        raise DataError(
            f"{paths.checkpoints} is not a directory",
            cause="a file or a dangling link was put there",
            fix=f"move it away: mv {paths.checkpoints} {paths.checkpoints}.old",
        )
    if os.path.lexists(link):
        there = committed(paths.checkpoints)
        relink = f" && ln -s {there[-1].name} {link}" if there else "   (starts at step 0)"
        raise DataError(
            f"{link} is not a symbolic link",
            cause="a copy of the run that followed links (cp -L, rsync -L), or an edit",
            fix=f"mv {link} {link}.old{relink}",
        )
    return None


def target_of(link: Path) -> Path:
    """Target of a link that Forge has made: a checkpoint in the same directory, by its plain name.

    Raises DataError for any other link, also for a link to a link: its target may not belong to this
    run, and would be moved, removed or put into another directory.
    """
    name = str(link.readlink())
    try:
        target = link.parent / plain_name(name)
    except ValueError:
        raise _leads_out(link, name, "which is not the name of a checkpoint beside it") from None
    if name.startswith(TEMPORARY) or target == RunPaths(link.parent.parent).quarantine:
        raise _leads_out(link, name, "which is not a checkpoint")
    if target.is_symlink() and target != link:
        raise _leads_out(link, name, f"which is a link to {str(target.readlink())!r}")
    return target


def _leads_out(link: Path, name: str, why: str) -> DataError:
    there = [folder.name for folder in committed(link.parent)]
    best = Path(name).name if Path(name).name in there else there[-1] if there else None
    relink = f"ln -sfn {best} {link}" if best else f"rm {link}   (starts at step 0)"
    return DataError(
        f"{link} points to {name!r}, {why}: it is not followed",
        cause="made by hand, or it came with a run from elsewhere; to start from a checkpoint of another"
        " run, the config has `parent`",
        fix=relink if link == RunPaths(link.parent.parent).latest else f"rm {link}",
    )


def refuse_link(folder: Path) -> None:
    """DataError where a directory of a run is a link. In a run from elsewhere it may lead to any
    directory, where Forge would write, move and remove."""
    if folder.is_symlink():
        raise DataError(
            f"{folder} is a link to {str(folder.readlink())!r}: it is not followed",
            cause="made by hand, or it came with a run from elsewhere",
            fix=f"remove the link; for another disk set `results`, or make {folder.parent} a link",
        )


def restore_or_retrain(paths: RunPaths) -> str:
    """Advice where the checkpoint of a run that has ended was removed: the workflow does not train
    such a run again unasked, nor because trained.json alone is missing."""
    records = f"{paths.root}/{{trained,validated}}.json"
    return f"restore it, or to retrain: rm -f {records}, then rerun the command"


def _trouble(link: Path) -> str:
    if not link.is_symlink():
        return "is missing"
    exists = os.path.lexists(link.parent / link.readlink())  # a file, or a circle of links
    return (
        f"points to {link.readlink()}, which {'is not a directory' if exists else 'does not exist'}"
    )


# --- saving ----------------------------------------------------------------------------------------


def begin(paths: RunPaths, step: int, size: int = 0) -> Path:
    """Make an empty temporary directory for the checkpoint of this step. Rank 0.

    Raises UnfitError when fewer than `size` + SPARE_BYTES bytes are free.
    """
    folder = temporary_folder(paths, step)
    with disk_trouble(folder):
        failpoints.reach("save.begin", folder)
        shutil.rmtree(folder, ignore_errors=True)
        paths.checkpoints.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(paths.checkpoints).free
    needed = size + SPARE_BYTES
    if free < needed:
        raise DiskFull(
            f"the checkpoint of step {step} needs {needed / 2**20:,.1f} MiB in {paths.checkpoints},"
            f" {free / 2**20:,.1f} MiB are free",
            cause="the disk is almost full",
            fix="free space and rerun the same command; what was committed before is intact",
        )
    with disk_trouble(folder):
        folder.mkdir()
    return folder


def temporary_folder(paths: RunPaths, step: int) -> Path:
    """Directory in which the checkpoint of this step is written before it is committed."""
    return paths.checkpoints / f"{TEMPORARY}{checkpoint_name(step)}"


def commit(
    paths: RunPaths,
    folder: Path,
    manifest: Manifest,
    keep_last: int,
    keep_every: int | None = None,
) -> Checkpoint:
    """Make a written temporary directory the newest checkpoint, durably, then prune. Rank 0.

    Every rank has fsynced the files that it wrote.
    """
    final = paths.checkpoints / checkpoint_name(manifest.step)
    with disk_trouble(final):
        failpoints.reach("commit.manifest", folder)
        if lost := [name for name in manifest.files if not (folder / name).is_file()]:
            raise UnfitError(
                f"{', '.join(lost)} disappeared from {folder}: nothing was committed",
                cause="removed by hand, or by a second command that trains this run",
                fix="make sure that only one command trains this run, and rerun it",
            )
        manifest = manifest.write(folder)
        failpoints.reach("commit.intent", folder)
        intent = _intent(paths)
        intent.unlink(missing_ok=True)
        intent.symlink_to(final.name)
        if (
            final.exists()
        ):  # the same step again, after `latest` was set back to an older checkpoint
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
    """The next `latest` of a commit in progress. Its presence tells an interrupted commit from a
    `latest` that a user has set back to an older checkpoint."""
    return paths.checkpoints / f"{TEMPORARY}latest"


def finish_commit(paths: RunPaths) -> None:
    """Replace `latest` where a commit was interrupted after its rename. Under the run's lock only. Raises
    DataError as `target_of` and `refuse_link`."""
    refuse_link(paths.checkpoints)
    intent = _intent(paths)
    if not intent.is_symlink():
        return
    target_of(intent)
    with disk_trouble(intent):
        replaced = paths.checkpoints / f"{TEMPORARY}replaced-{intent.readlink()}"
        final = paths.checkpoints / intent.readlink()
        # Still there: interrupted before both renames, `final` is an abandoned checkpoint of this step.
        written = paths.checkpoints / f"{TEMPORARY}{intent.readlink()}"
        if replaced.is_dir() and not final.exists():
            replaced.rename(
                final
            )  # interrupted between the two renames: restore the old checkpoint
            intent.unlink()
        elif (final / MANIFEST).is_file() and not (written / MANIFEST).is_file():
            say(f"finishing the commit of {final}")
            intent.replace(paths.latest)
        else:
            intent.unlink()
        fsync_folder(paths.checkpoints)


def prune(paths: RunPaths, keep_last: int, keep_every: int | None = None) -> None:
    """Remove all but the newest `keep_last` checkpoints and those at multiples of `keep_every`.

    Keeps the one behind `latest`, and newer ones, which are left where a user has set `latest` back.
    A checkpoint that cannot be removed stays, with a warning: the next save tries again.
    """
    folder = linked(paths)
    newest = (checkpoint_step(folder.name) or 0) if folder else 0
    line = [f for f in committed(paths.checkpoints) if _step_of(f) <= newest]
    for folder in line[:-keep_last]:
        if not keep_every or _step_of(folder) % keep_every:
            remove(folder)
    clean(paths)


def _step_of(folder: Path) -> int:
    step = checkpoint_step(folder.name)
    assert step is not None
    return step


def remove(folder: Path) -> None:
    """Remove an old checkpoint, a directory or a file; a warning where that is not possible."""
    try:
        # Rename first: an interrupted removal must not leave half a checkpoint under its name.
        failpoints.reach("prune.rename", folder)
        doomed = folder.with_name(f"{TEMPORARY}pruned-{folder.name}")
        _delete(doomed)
        folder.rename(doomed)
        failpoints.reach("prune.remove", doomed)
        _delete(doomed)
    except OSError as err:
        say(f"warning: cannot remove the old checkpoint {folder}: {err}")


def _delete(path: Path) -> None:
    """Remove a directory as far as that is possible, or a file or a link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def clean(paths: RunPaths) -> None:
    """Remove leftovers of an interrupted save or prune. Under the run's lock only."""
    for leftover in paths.checkpoints.glob(f"{TEMPORARY}*"):
        _delete(leftover)


# --- `latest` and corrupt checkpoints --------------------------------------------------------------


def repair_latest(paths: RunPaths) -> Path | None:
    """The directory that `latest` points to; a dangling or missing link is replaced. None when no
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
    point_latest(paths, there[0])
    return there[0]


def fallbacks(paths: RunPaths, name: str | None = None) -> list[Path]:
    """Committed directories in the order in which training falls back to them from the checkpoint
    `name`, by default that of `latest`: first older ones, the newest first, then newer ones."""
    link = paths.latest
    if name is None and link.is_symlink():
        name = link.readlink().name
    step = checkpoint_step(name or "")
    there = committed(paths.checkpoints)[::-1]
    older = [folder for folder in there if step is None or _step_of(folder) < step]
    return older + [folder for folder in there if folder not in older]


def free_name(folder: Path, name: str) -> Path:
    """A path in the directory that does not exist: `name`, else `name.2`, …"""
    new = folder / name
    for number in itertools.count(2):
        if not new.exists():
            break
        new = folder / f"{name}.{number}"
    return new


def point_latest(paths: RunPaths, folder: Path) -> None:
    """Swap the relative symlink `latest` by rename, so that it always resolves."""
    temporary = paths.checkpoints / f"{TEMPORARY}repaired-latest"
    with disk_trouble(temporary):
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(folder.name)
        temporary.replace(paths.latest)
        fsync_folder(paths.checkpoints)


def quarantine(paths: RunPaths, folder: Path, reasons: Sequence[str]) -> Path:
    """Move a corrupt checkpoint to quarantine/, with its reasons; the new path.

    `latest`, if it pointed there, points to the next older one, or is removed. Under the run's
    lock only, on one rank. Raises UnfitError when the disk refuses the move, DataError as `refuse_link`.
    """
    followers = [other for other in fallbacks(paths, folder.name) if other.name != folder.name]
    was_latest = linked(paths) == folder.resolve()

    def move(new: Path) -> Path:
        folder.rename(new)
        if was_latest and followers:
            point_latest(paths, followers[0])
        elif was_latest:
            paths.latest.unlink()
        return new / DAMAGE

    new = move_to_quarantine(paths, folder, reasons, move)
    say(f"warning: checkpoint {folder} is corrupt: {'; '.join(reasons)}")
    following = "no other checkpoint is left"
    if not was_latest:
        following = "`latest` is unchanged"
    elif followers:
        following = f"using {followers[0].name}"
    say(f"warning: moved {folder.name} to {new}; {following}")
    return new


def move_to_quarantine(
    paths: RunPaths, folder: Path, reasons: Sequence[str], move: Callable[[Path], Path]
) -> Path:
    """Move a checkpoint, of whichever program, to quarantine/ and record it; the new path.

    move: renames it to this path; gives the path of the record of its reasons. Raises DataError as
    `refuse_link`.
    """
    refuse_link(paths.quarantine)
    new = free_name(paths.quarantine, folder.name)
    with disk_trouble(new):
        paths.quarantine.mkdir(exist_ok=True)
        record = move(new)
        fsync_folder(paths.checkpoints)
    events.record(paths.events, events.Quarantine(checkpoint=folder.name, reasons=list(reasons)))
    with suppress(UnfitError):
        Damage(reasons=list(reasons)).write(record)
    return new
