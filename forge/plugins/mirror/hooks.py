"""Mirror: a launch on nodes that do not see the directory of its run. docs/plugins/mirror.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from forge.core.hooks import BeginLaunch, hook

if TYPE_CHECKING:
    from forge.core.file_list import FileList
    from forge.core.machine import Machine
    from forge.core.paths import RunPaths


@hook
def agent_functions() -> Sequence[Callable[..., Any]]:
    from forge.plugins.mirror import checkpoint_copies, mirror_on_node

    return [*mirror_on_node.CALLS, *checkpoint_copies.CALLS]


@hook
def run_directories(
    paths: RunPaths, machine: Machine, placement: Any, python: str, checkpoint: FileList | None
) -> BeginLaunch | None:
    from forge.plugins.mirror.mirror import Mirror, is_needed

    if not is_needed(machine, placement):
        return None
    from forge.plugins.mirror.checkpoint_copies import send_checkpoint

    copy = send_checkpoint(checkpoint, machine, placement, python) if checkpoint else ""
    return partial(Mirror, paths=paths, placement=placement, python=python, checkpoint=copy)
