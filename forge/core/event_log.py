"""The event log of a run: an append-only JSON lines file that survives every restart."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from forge.core.files import disk_trouble


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append one JSON line in a single write, so that lines of several writers never mix.

    A last line cut by a crash is closed first, so that it spoils itself only.
    """
    line = json.dumps(record, allow_nan=False) + "\n"
    with disk_trouble(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    line = "\n" + line
            file.write(line.encode())


def record(events: Path, event: str, /, **facts: Any) -> None:
    """Append an event with its time (seconds since the epoch) to a run's events.jsonl."""
    append_line(events, {"time": round(time.time(), 3), "event": event, **facts})


def read_events(events: Path) -> list[dict[str, Any]]:
    """What `record` has written, oldest first; other lines are passed over."""
    return [line for line in read_lines(events) if isinstance(line.get("event"), str)]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Every whole JSON line of a file, oldest first; [] where there is no file."""
    lines: list[dict[str, Any]] = []
    if not path.exists():
        return lines
    for line in path.read_text(errors="replace").splitlines():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue  # cut by a crash in the middle of a write
        if isinstance(value, dict):
            lines.append(value)
    return lines
