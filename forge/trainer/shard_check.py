"""The check of token shards at the start of a launch: ranks share the reading of the files."""

from __future__ import annotations

from pathlib import Path

from forge.core.files import identity_of
from forge.data.sources import Tokens, open_copy
from forge.launch.process_group import World
from forge.launch.rank_records import TrainTask


def verified_tokens(task: TrainTask, world: World) -> Tokens:
    """The tokens of a run, their digests verified. Raises DataError. All ranks call it.

    Each rank reads a share of the files, for all ranks that read the same: those of a node where it has
    its own copy, those of all such nodes where they read a shared directory.
    """
    what = "check of shards"

    def opened() -> tuple[Tokens, str]:
        tokens = open_copy(Path(task.shards_here), Path(task.shared))
        return tokens, identity_of(member.path for member in tokens.members)

    tokens, own = world.patiently(opened, what)
    identities = world.gather_objects(own, str, what)
    readers = [rank for rank, identity in enumerate(identities) if identity == own]
    share = (readers.index(world.rank.rank), len(readers))
    world.patiently(lambda: tokens.verify(share), what)
    return tokens
