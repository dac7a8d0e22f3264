"""Failpoints for fault-injection tests: named points in the life of a checkpoint and of a batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

# What lies at each point, in the order in which a run comes by. docs/faults.md has what follows when
# a process dies, a write fails or a file is changed at each of them.
POINTS = {
    "data.read": "before a batch is read from the shards",
    "save.begin": "before the temporary folder is made",
    "save.staged": "after the state was copied, before it is written",
    "save.write": "before each write into a file of tensors",
    "save.sync": "before a file of tensors is fsynced",
    "save.written": "after all files of this rank are on disk",
    "commit.manifest": "before the manifest is written",
    "commit.intent": "before the intended `latest` is noted",
    "commit.rename": "before the folder gets its final name",
    "commit.latest": "before `latest` is swapped",
    "commit.done": "after `latest` was swapped",
    "prune.rename": "before an old checkpoint is put aside",
    "prune.remove": "before the files of an old checkpoint are removed",
    "load.verify": "before the digests of a checkpoint are compared",
    "load.read": "before a file of tensors is read",
    "load.done": "after weights and moments are in place",
}

hook: Callable[[str, Path | None], None] | None = None
"""Called at each point with its name and the file or folder concerned; None outside of tests."""


def reach(point: str, path: Path | None = None) -> None:
    """Tell the hook, if there is one, that this process has come to `point`."""
    if hook is not None:
        hook(point, path)
