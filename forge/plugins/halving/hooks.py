"""Halving: a sweep whose worse runs stop, and whose best ones train on. docs/plugins/halving.md."""

from __future__ import annotations

from typing import Any

from forge.core.hooks import hook


@hook
def add_subcommands(subcommands: Any) -> None:
    from forge.plugins.halving.command import add_halve

    add_halve(subcommands)
