"""Failpoints: named points in the life of a checkpoint and of a batch, for fault-injection tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

# In the order in which a run reaches them. docs/faults.md has the outcome of a killed process, a failed
# write and a changed file at each of them.
FAILPOINTS = {
    "data.read": "before a batch is read from the shards",
    "save.begin": "before the temporary directory is made",
    "save.staged": "after the state was copied, before it is written",
    "save.write": "before each write into a file of tensors",
    "save.sync": "before a file of tensors is fsynced",
    "save.written": "after all files of this rank are on disk",
    "commit.manifest": "before the manifest is written",
    "commit.intent": "before the new target of `latest` is recorded",
    "commit.rename": "before the directory gets its final name",
    "commit.latest": "before `latest` is replaced",
    "commit.done": "after `latest` was replaced",
    "prune.rename": "before an old checkpoint is renamed for removal",
    "prune.remove": "before the files of an old checkpoint are removed",
    "load.verify": "before the digests of a checkpoint are compared",
    "load.read": "before a file of tensors is read",
    "load.done": "after weights and optimizer state are loaded",
}

hook: Callable[[str, Path | None], None] | None = None
"""Called at each failpoint with its name and the path concerned; None outside of tests."""


def reach(failpoint: str, path: Path | None = None) -> None:
    """Call the hook, if a test has set one."""
    if hook is not None:
        hook(failpoint, path)
