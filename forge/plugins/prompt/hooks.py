"""Prompt: text that continues a prompt, by a run's checkpoint. docs/plugins/prompt.md."""

from __future__ import annotations

from typing import Any

from forge.core.hooks import hook


@hook
def add_subcommands(subcommands: Any) -> None:
    from forge.plugins.prompt.command import add_prompt

    add_prompt(subcommands)
