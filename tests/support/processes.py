"""The processes of this machine, for tests that look for theirs among them, and how a command ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Outcome:
    """How a command ended: its exit code, negative for a signal, and what it said."""

    code: int
    text: str
    seconds: float = 0.0


def running() -> Iterator[psutil.Process]:
    """All processes, looked up now: psutil.process_iter() keeps what it found under a pid in an earlier
    call, and refuses to send a signal to the process that has this pid today."""
    psutil.process_iter.cache_clear()
    return psutil.process_iter()
