"""Forge: raw text to a validated language-model checkpoint with one command."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge.notebook import load as load

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`forge.load`, imported when it is asked for: every start of `forge` imports this module."""
    if name == "load":
        from forge.notebook import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), "load"]
