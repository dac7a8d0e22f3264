"""Samples: the text that a step of a run has read, and the steps that have read a text.
docs/plugins/samples.md."""

from __future__ import annotations

from typing import Any

from forge.core.hooks import hook


@hook
def add_subcommands(subcommands: Any) -> None:
    from forge.plugins.samples.command import add_samples

    add_samples(subcommands)
