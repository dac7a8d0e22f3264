"""The check of token shards at the start of a launch: ranks share the reading of the files."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from forge.core.errors import UnfitError
from forge.core.files import identity_of
from forge.core.process import slurm_start
from forge.core.terminal import say
from forge.data.copy_stamp import CopyStamp
from forge.data.sources import Tokens, open_copy
from forge.launch.process_group import World
from forge.launch.rank_records import TrainTask


def verified_tokens(task: TrainTask, world: World) -> Tokens:
    """The tokens of a run, their digests verified. Raises DataError. All ranks call it.

    Each rank reads a share of the files, for all ranks that read the same: those of a node where it has
    its own copy, those of all such nodes where they read a shared directory. A copy that ranks of this
    Slurm job have verified, and that is unchanged since, is not read again.
    """
    what = "check of shards"

    def opened() -> tuple[Tokens, str, CopyStamp | None, bool]:
        tokens = open_copy(Path(task.shards_here), Path(task.shared))
        identity = identity_of(member.path for member in tokens.members)
        stamp = CopyStamp.of_job(tokens, Path(task.shared))
        return tokens, identity, stamp, stamp is not None and stamp.is_there

    tokens, own, stamp, is_verified = world.patiently(opened, what)
    # All decide by this table: another run of the job may have left its stamp when only some had looked.
    table = world.gather_objects((own, is_verified), tuple[str, bool], what)
    to_read = {identity for identity, done in table if not done}
    readers = [rank for rank, (identity, _) in enumerate(table) if identity == own]
    share = (readers.index(world.rank.rank), len(readers))
    copies = {identity for identity, _ in table}
    if world.rank.is_main and (unread := copies - to_read):
        say(
            f"{len(unread)} of {len(copies)} copies of the shards are not verified again: ranks of job"
            f" {slurm_start()[0]} have done so in this boot of their nodes, and no file has changed"
        )
    world.patiently(lambda: tokens.verify(share) if own in to_read else None, what)
    if stamp and own in to_read and share[0] == 0:
        with suppress(UnfitError, OSError):  # such as a full disk: the next launch reads them again
            stamp.write()
    return tokens
