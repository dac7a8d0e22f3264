"""The result of one check of a node, of ranks or of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """What a check found, the likely cause, and what to do about it."""

    name: str
    status: Status
    message: str
    fix: str = ""
    cause: str = ""
