"""The result of one check of a node, of ranks or of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """Result of a check: what is wrong, the likely cause, and what to do about it."""

    name: str
    status: Status
    message: str
    fix: str = ""
    cause: str = ""


def failed(checks: Iterable[Check]) -> list[Check]:
    return [check for check in checks if check.status == "fail"]


def summary(checks: Iterable[Check]) -> str:
    """Names and messages of all checks, in one line."""
    return "; ".join(f"{check.name}: {check.message}" for check in checks)
