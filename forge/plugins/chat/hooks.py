"""Chat: training on conversations, of which a model learns the answers (`tokenize.format: chat`).
docs/plugins/chat.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge.core.hooks import hook
from forge.core.text_formats import TextFormat
from forge.plugins.chat import template


@hook
def text_formats() -> Mapping[str, TextFormat]:
    marks = (template.START, template.END)
    return {"chat": TextFormat(module="forge.plugins.chat.packing", special_tokens=marks)}


@hook
def export_keys(config: Any, tokenizer: Any) -> Mapping[str, Mapping[str, Any]]:
    return template.export_keys(config, tokenizer)
