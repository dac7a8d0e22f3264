"""Site: a profile for a cluster, from what its Slurm says (`forge profile`). docs/plugins/site.md."""

from __future__ import annotations

from typing import Any

from forge.core.hooks import hook


@hook
def add_subcommands(subcommands: Any) -> None:
    from forge.plugins.site.command import add_profile

    add_profile(subcommands)
