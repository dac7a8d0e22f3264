"""Merge: a mean of checkpoints of a run in place of a decay of the learning rate.
docs/plugins/merge.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.core.hooks import hook

if TYPE_CHECKING:
    from forge.attestation.verify import Links
    from forge.core.paths import RunPaths


@hook
def add_subcommands(subcommands: Any) -> None:
    from forge.plugins.merge.command import add_merge

    add_merge(subcommands)


@hook
def verify_by_run(export: Path, run: RunPaths, links: Links) -> Sequence[str]:
    if "merge" not in links:
        return []
    from forge.plugins.merge.verify import verify_merge

    return [verify_merge(export, run, links)]
