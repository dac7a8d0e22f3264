"""What the ranks go on from: the newest checkpoint whose every byte is right, of the same data."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from forge import store
from forge.errors import DataError
from forge.paths import RunPaths

if TYPE_CHECKING:
    from forge.world import World


def newest_verified(
    paths: RunPaths, world: World, *, require_checkpoint: bool
) -> store.Checkpoint | None:
    """The checkpoint behind `latest`, all its bytes read, the files shared out among the ranks.

    Damaged ones go to quarantine and the next older one is looked at; None when none is left, which is
    DataError with require_checkpoint. All ranks call it.
    """
    share = (world.rank.rank, world.rank.world_size)
    lost = False
    while (found := store.latest(paths)) is not None:
        mine = world.together(partial(_bad_files, found, share), "check of digests")
        damage = [bad for part in world.gather_objects(mine, "damage") for bad in part]
        if not damage:
            return found
        lost = True
        world.on_main(partial(store.quarantine, paths, found.folder, damage), "quarantine")
    if lost:
        world.on_main(partial(store.begin_afresh, paths, require_checkpoint), "fresh start")
    return None


def _bad_files(checkpoint: store.Checkpoint, share: tuple[int, int]) -> list[str]:
    return list(checkpoint.bad_files(share=share))


def check_same_data(found: store.Checkpoint, *, tokens: str, tokenizer: str) -> None:
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
