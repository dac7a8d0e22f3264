"""Choose the checkpoint to resume from: the newest valid one that was trained on the same data."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from forge.checkpoint import directory, parent
from forge.core.config import ResolvedConfig
from forge.core.errors import DataError, UnfitError
from forge.core.files import disk_trouble
from forge.core.paths import RunPaths
from forge.core.process import hostname

if TYPE_CHECKING:
    from forge.launch.process_group import World

# For so long an NFS client may not see what another one has made (man 5 nfs, acdirmax).
NETWORK_CACHE_SEC = 60.0


def newest_verified(
    paths: RunPaths, world: World, *, require_checkpoint: bool, parent_name: str | None = None
) -> directory.Checkpoint | None:
    """The checkpoint behind rank 0's `latest`, all its bytes read, the files shared out among the ranks.

    Damaged ones go to quarantine and the next older one is looked at; None when none is left, which is
    DataError with require_checkpoint. parent_name: the warning says that training then starts from it.
    All ranks call it.
    """
    lost = False
    while (found := _chosen(paths, world)) is not None:
        damage = _damage(found, world)
        if not damage:
            return found
        lost = True
        world.on_main(partial(directory.quarantine, paths, found.folder, damage), "quarantine")
    if lost:
        begin = partial(directory.begin_afresh, paths, require_checkpoint, parent_name)
        world.on_main(begin, "fresh start")
    return None


def verified_parent(config: ResolvedConfig, world: World) -> directory.Checkpoint | None:
    """The checkpoint that config.parent names, all its bytes read, the files shared out among the ranks;
    None without a parent. All ranks call it.

    Never another one than the config names, and nothing of the parent is moved. Raises ConfigError and
    DataError as parent.find does.
    """
    named = parent.Parent.of(config)
    if named is None:
        return None
    what = "choice of the parent's checkpoint"
    world.on_main(partial(parent.find, config), what)
    found = _open_alike(named.folder, world, what)
    if damage := _damage(found, world):
        raise parent.corrupt(config, damage)
    return found


def _damage(found: directory.Checkpoint, world: World) -> list[str]:
    """What is wrong with a checkpoint's files, the same on all ranks, each of which reads its share."""
    share = (world.rank.rank, world.rank.world_size)
    mine = world.patiently(partial(_bad_files, found, share), "check of digests")
    return [bad for part in world.gather_objects(mine, "damage") for bad in part]


def _chosen(paths: RunPaths, world: World) -> directory.Checkpoint | None:
    """What rank 0 goes on from, the same on all ranks: other nodes may see a network file system as it
    was some seconds ago. Raises UnfitError when a node does not see that checkpoint."""

    def look() -> str:
        found = directory.latest(paths) if world.rank.is_main else None
        return os.path.relpath(found.folder, paths.checkpoints.resolve()) if found else ""

    what = "choice of the checkpoint"
    name = world.gather_objects(world.together(look, what), what)[0]
    return _open_alike(paths.checkpoints / name, world, what) if name else None


def _open_alike(folder: Path, world: World, what: str) -> directory.Checkpoint:
    """A checkpoint, the same on all ranks. Raises UnfitError when a node does not see it."""
    found = world.patiently(partial(_open, folder), what)
    digests = world.gather_objects(found.manifest["digest"], what)
    if len(set(digests)) > 1:
        raise UnfitError(
            f"{found.folder} is not the same checkpoint on all nodes",
            cause="the network file system shows an old state on some of them",
            fix="give the same command again",
        )
    return found


def _open(folder: Path) -> directory.Checkpoint:
    """The checkpoint, waited for where this node does not see it yet. Raises DataError, UnfitError."""
    end = time.monotonic() + NETWORK_CACHE_SEC
    with disk_trouble(folder, "read"):
        while not (folder / directory.MANIFEST).exists() and time.monotonic() < end:
            time.sleep(0.5)
        if not (folder / directory.MANIFEST).exists():
            raise UnfitError(
                f"{hostname()} does not see {folder / directory.MANIFEST}, which rank 0 goes on from",
                cause="the results are not on a file system that all nodes share",
                fix="choose another folder for `results`",
            )
        return directory.Checkpoint.open(folder)


def _bad_files(checkpoint: directory.Checkpoint, share: tuple[int, int]) -> list[str]:
    try:
        return list(checkpoint.bad_files(share=share))
    except FileNotFoundError as err:  # of a parent run that is training, and prunes
        return [f"{err.filename} was removed while it was read"]


def check_same_data(found: directory.Checkpoint, *, tokens: str, tokenizer: str) -> None:
    """DataError when a checkpoint was trained on data with other digests than these."""
    for name, now in (("tokens", tokens), ("tokenizer", tokenizer)):
        then = found.manifest["lineage"][name]["digest"]
        if then != now:
            raise DataError(
                f"the {name} of this run have digest {now[:12]}, {found.folder} was trained"
                f" with {then[:12]}",
                cause="the corpus or the tokenizer was edited in place and made again",
                fix="restore the old input, or give the run a new name",
            )
