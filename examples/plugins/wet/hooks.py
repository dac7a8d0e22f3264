"""Texts of Common Crawl (WET files) as a plugin of a project: docs/plugins/own.md."""

from __future__ import annotations

from forge.core.hooks import hook
from forge.core.text_formats import TextFormat


@hook
def text_formats() -> dict[str, TextFormat]:
    return {"wet": TextFormat(module=f"{__package__}.reader")}
