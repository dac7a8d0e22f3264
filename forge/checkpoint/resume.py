"""Choose the checkpoint of a run. No torch.

- Read-only, for validation, export, report and people: `latest`, `required`, `named`, `at_step`.
- Under the run's lock, before training: `repaired_latest` falls back to an older checkpoint where the
  newest one is not complete; then the ranks verify all digests (`newest_verified`).
- Before a start, without the lock: `check_resumable` says what training would resume from.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from forge.checkpoint import compatibility, directory, parent
from forge.checkpoint.manifest import MANIFEST
from forge.core.config import ResolvedConfig
from forge.core.errors import ConfigError, DataError, OtherFormat, UnfitError
from forge.core.files import disk_trouble
from forge.core.paths import (
    CHECKPOINT_PREFIX,
    RunPaths,
    by_step,
    checkpoint_name,
    checkpoint_step,
)
from forge.core.process import hostname
from forge.core.terminal import say

if TYPE_CHECKING:
    from forge.launch.process_group import World

# An NFS client may see a new file of another client only after this time (man 5 nfs, acdirmax).
NETWORK_CACHE_SEC = 60.0


@dataclass(frozen=True)
class CommittedCheckpoints:
    """The checkpoints of a run of Forge's own trainer."""

    paths: RunPaths

    def latest(self) -> directory.Checkpoint | None:
        return latest(self.paths)

    def check_still_there(self, step: int) -> None:
        """Also DataError where `latest` does not point to it. Raises as `open_complete`."""
        paths, folder = self.paths, self.paths.checkpoints / checkpoint_name(step)
        with disk_trouble(folder, "read"):
            linked = directory.linked(paths)
            if not folder.is_dir():
                raise DataError(f"{folder} is missing", fix=directory.restore_or_retrain(paths))
            try:
                self.open_complete(folder)
            except OtherFormat:
                raise
            except DataError as err:
                raise DataError(err.what, fix=f"forge validate {paths.root} --all") from None
            if linked != folder.resolve():
                where = f"points to {linked.name}" if linked else "is missing"
                raise DataError(
                    f"{paths.latest} {where}", fix=f"ln -sfn {folder.name} {paths.latest}"
                )

    def by_step(self) -> dict[int, Path]:
        """With or without a manifest."""
        steps = {checkpoint_step(f.name): f for f in directory.folders(self.paths.checkpoints)}
        return {step: folder for step, folder in steps.items() if step is not None}

    def open_complete(self, folder: Path) -> directory.Checkpoint:
        return directory.Checkpoint.open_complete(folder)

    def trouble_of_latest(self) -> str:
        try:
            directory.latest_folder(self.paths)
        except DataError as err:
            return err.what
        return ""

    def quarantined(self) -> Iterator[tuple[Path, Path]]:
        for folder in reversed(directory.folders(self.paths.quarantine)):
            yield folder, folder / directory.DAMAGE

    def finish_launch(self) -> None:
        directory.finish_commit(self.paths)

    def quarantine(self, folder: Path, reasons: Sequence[str]) -> Path:
        return directory.quarantine(self.paths, folder, reasons)

    def repaired_latest(self) -> directory.Checkpoint | None:
        return repaired_latest(self.paths)


def latest(paths: RunPaths) -> directory.Checkpoint | None:
    """The checkpoint that `latest` points to; None for a run without checkpoints.

    Raises DataError when `latest` dangles, or does not point to a checkpoint.
    """
    folder = directory.latest_folder(paths)
    return directory.Checkpoint.open(folder) if folder else None


def required(paths: RunPaths) -> directory.Checkpoint:
    """Return the checkpoint of `latest`; DataError for a run without checkpoints."""
    checkpoint = latest(paths)
    if checkpoint is None:
        raise DataError(
            f"{paths.root} has no checkpoint",
            cause="the run has not committed one yet, or this is not a run's directory",
            fix="train the run first, or name the directory of a run or a checkpoint",
        )
    return checkpoint


def named(place: Path) -> directory.Checkpoint:
    """The checkpoint in a directory that a user names: of the checkpoint itself, or of a run, which
    stands for its latest one. Raises DataError where there is none."""
    if is_checkpoint(place):
        return directory.Checkpoint.open(place.resolve())
    return required(RunPaths(place))


def at_step(paths: RunPaths, step: int) -> directory.Checkpoint:
    """The checkpoint of this step. ConfigError, with the steps that are there, where there is none."""
    directory.refuse_link(paths.checkpoints)
    folder = paths.checkpoints / checkpoint_name(step)
    if folder not in directory.committed(paths.checkpoints):
        raise ConfigError(
            f"{paths.root} has no checkpoint of step {step}",
            cause="not trained up to that step, removed by train.keep_last, or moved to quarantine",
            fix=f"name another one: {paths.checkpoints} has {directory.steps_there(paths.checkpoints)}",
        )
    return directory.Checkpoint.open(folder)


def is_checkpoint(place: Path) -> bool:
    """Return whether a directory is that of a checkpoint, and not of a run."""
    has_its_name = checkpoint_step(place.resolve().name) is not None
    is_named = (place / MANIFEST).exists() or has_its_name
    return is_named and not RunPaths(place).checkpoints.is_dir()


def repaired_latest(paths: RunPaths) -> directory.Checkpoint | None:
    """The checkpoint that `latest` points to, or the next one to fall back to that is complete.

    Moves incomplete ones to quarantine and repairs `latest`, both with a warning; None when none is
    left. Digests are verified by `newest_verified`. Under the run's lock only. Raises OtherFormat,
    UnfitError, and DataError where `latest` is not a link.
    """
    directory.finish_commit(paths)
    while (folder := directory.repair_latest(paths)) is not None:
        try:
            return directory.Checkpoint.open_complete(folder)
        except OtherFormat:
            raise
        except DataError as err:
            directory.quarantine(paths, folder, [err.what])
    return None


def verified_here(paths: RunPaths) -> directory.Checkpoint | None:
    """Return the checkpoint of `repaired_latest` after this process has verified all digests, where other
    nodes do not see the checkpoints and would have no older one to fall back to."""
    while (checkpoint := repaired_latest(paths)) is not None:
        damage = list(checkpoint.bad_files())
        if not damage:
            break
        directory.quarantine(paths, checkpoint.folder, damage)
    return checkpoint


def check_resumable(config: ResolvedConfig, paths: RunPaths) -> directory.Checkpoint | None:
    """The checkpoint that this config will resume from, None for a fresh start; changes nothing.

    Skips those that training would move to quarantine. Raises ConfigError as
    `compatibility.check_compatible` does, and as `repaired_latest`.
    """
    linked = directory.linked(paths)
    for folder in [*([linked] if linked else []), *directory.fallbacks(paths)]:
        try:
            checkpoint = directory.Checkpoint.open_complete(folder)
        except OtherFormat:
            raise
        except DataError:
            continue
        compatibility.check_compatible(config, checkpoint)
        return checkpoint
    return None


def begin_afresh(paths: RunPaths, refuse: bool, parent_name: str | None = None) -> None:
    """Called when no checkpoint is left to resume from: DataError with `refuse` (--require-checkpoint),
    else a warning where checkpoints are in quarantine. parent_name: the checkpoint of another run, or
    the pretrained weights, that training starts from instead. Rank 0, or the launcher."""
    there = sorted(paths.quarantine.glob(f"{CHECKPOINT_PREFIX}*"), key=by_step)
    lost = [folder.name for folder in there]
    if refuse:
        raise DataError(
            f"{paths.root} has no checkpoint to resume from"
            + (f"; in quarantine: {', '.join(lost)}" if lost else ""),
            cause="all were corrupt or removed" if lost else "none was ever committed",
            fix="restore a checkpoint, or leave out --require-checkpoint to start at step 0",
        )
    if lost:
        say(
            f"warning: no checkpoint of {paths.root} is left (in quarantine: {', '.join(lost)}):"
            f" training starts {f'from {parent_name}' if parent_name else 'at step 0 with fresh weights'}"
        )


def newest_verified(
    paths: RunPaths, world: World, *, require_checkpoint: bool, parent_name: str | None
) -> directory.Checkpoint | None:
    """The checkpoint that `latest` points to on rank 0, all digests verified; each rank reads a share.

    Corrupt ones are moved to quarantine, and the next older one is verified. None when none is left,
    which is a DataError with require_checkpoint. parent_name: as in `begin_afresh`. All ranks call it.
    """
    lost = False
    while (checkpoint := _chosen(paths, world)) is not None:
        damage = _damage(checkpoint, world)
        if not damage:
            return checkpoint
        lost = True
        world.on_main(partial(_set_aside, paths, checkpoint.folder, damage), "quarantine")
    if lost:
        begin = partial(begin_afresh, paths, require_checkpoint, parent_name)
        world.on_main(begin, "fresh start")
    return None


def _set_aside(paths: RunPaths, folder: Path, damage: Sequence[str]) -> None:
    """Quarantine a corrupt checkpoint, and those after it that are not complete."""
    directory.quarantine(paths, folder, damage)
    repaired_latest(paths)  # the next one may have no readable manifest


def verified_parent(config: ResolvedConfig, world: World) -> directory.Checkpoint | None:
    """The checkpoint that config.parent names, all digests verified; each rank reads a share. None
    without a parent. All ranks call it.

    Never falls back to another checkpoint, and moves none to quarantine. Raises ConfigError and
    DataError as parent.find does.
    """
    named = parent.Parent.of(config)
    if named is None:
        return None
    what = "choice of the parent's checkpoint"
    world.on_main(partial(parent.find, config), what)
    checkpoint = _open_alike(named.folder, world, what)
    if damage := _damage(checkpoint, world):
        raise parent.corrupt(config, damage)
    return checkpoint


def _damage(checkpoint: directory.Checkpoint, world: World) -> list[str]:
    """Sentences on corrupt files, the same on all ranks; each rank reads a share of the files."""
    share = (world.rank.rank, world.rank.world_size)
    corrupt = world.patiently(partial(_bad_files, checkpoint, share), "check of digests")
    return [bad for part in world.gather_objects(corrupt, list[str], "damage") for bad in part]


def _chosen(paths: RunPaths, world: World) -> directory.Checkpoint | None:
    """The checkpoint that `latest` points to on rank 0, the same on all ranks: on a network file system
    other nodes may see an older state. Raises UnfitError when a node does not see that checkpoint."""

    def look() -> str:
        newest = latest(paths) if world.rank.is_main else None
        return os.path.relpath(newest.folder, paths.checkpoints.resolve()) if newest else ""

    what = "choice of the checkpoint"
    name = world.gather_objects(world.together(look, what), str, what)[0]
    return _open_alike(paths.checkpoints / name, world, what) if name else None


def _open_alike(folder: Path, world: World, what: str) -> directory.Checkpoint:
    """Open the same checkpoint on all ranks. Raises UnfitError when a node does not see it."""
    checkpoint = world.patiently(partial(_open, folder), what)
    digests = world.gather_objects(checkpoint.manifest.digest, str, what)
    if len(set(digests)) > 1:
        raise UnfitError(
            f"{checkpoint.folder} is not the same checkpoint on all nodes",
            cause="the network file system shows an old state on some of them",
            fix="rerun the same command",
        )
    return checkpoint


def _open(folder: Path) -> directory.Checkpoint:
    """Open a checkpoint; waits where this node does not see it yet. Raises DataError, UnfitError."""
    end = time.monotonic() + NETWORK_CACHE_SEC
    with disk_trouble(folder, "read"):
        while not (folder / MANIFEST).exists() and time.monotonic() < end:
            time.sleep(0.5)
        if not (folder / MANIFEST).exists():
            raise UnfitError(
                f"{hostname()} does not see {folder / MANIFEST}, which rank 0 resumes from",
                cause="the results are not on a file system that all nodes share",
                fix="choose another directory for `results`, or set stage.results: first_node in"
                " machine.yaml",
            )
        return directory.Checkpoint.open(folder)


def _bad_files(checkpoint: directory.Checkpoint, share: tuple[int, int]) -> list[str]:
    try:
        return list(checkpoint.bad_files(share=share))
    except FileNotFoundError as err:  # pruned by the parent run, which is training
        return [f"{err.filename} was removed while it was read"]
