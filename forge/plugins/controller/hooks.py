"""Controller: the workflow without a terminal (`forge submit`). docs/plugins/controller.md."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forge.core.hooks import hook

if TYPE_CHECKING:
    from forge.core.config import ResolvedConfig
    from forge.core.errors import ForgeError


@hook
def add_subcommands(subcommands: Any) -> None:
    from forge.plugins.controller.command import add_submit

    add_submit(subcommands)


@hook
def check_plan(runs: Mapping[str, ResolvedConfig], rules: Mapping[str, Sequence[str]]) -> None:
    from forge.plugins.controller.controller_job import refuse_living
    from forge.slurm.adopt import CONTROLLED

    if not os.environ.get(CONTROLLED):  # else a controller has started this Snakemake
        refuse_living(runs)


@hook
def after_dry_run(flow: Any, refusal: ForgeError | None) -> None:
    from forge.plugins.controller.places import CHECKS

    if CHECKS in os.environ:
        from forge.plugins.controller.dry_run import answer

        answer(flow, refusal)


@hook
def status_lines() -> Sequence[str]:
    from forge.plugins.controller.controller_job import statuses

    return [line for one in statuses() for line in one.lines()]


@hook
def status_json() -> Mapping[str, Any]:
    from forge.plugins.controller.controller_job import statuses

    return {"controllers": [one.to_json() for one in statuses()]}
