"""JSON lines files: append-only, read while they are written, intact after a crash but for one line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from forge.core.files import disk_trouble


def append(path: Path, value: dict[str, Any]) -> None:
    """Append one JSON line in a single write, so that lines of several writers never mix.

    A last line cut by a crash is closed first, so that it spoils itself only. Raises ValueError for NaN
    and infinity, UnfitError where the disk does not let it.
    """
    line = json.dumps(value, allow_nan=False) + "\n"
    with disk_trouble(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    line = "\n" + line
            file.write(line.encode())


def read(path: Path) -> list[dict[str, Any]]:
    """Every complete JSON object in the file, oldest first; [] where there is no file."""
    if not path.exists():
        return []
    lines = path.read_text(errors="replace").splitlines()
    return [value for line in lines if (value := parse(line)) is not None]


def parse(line: str) -> dict[str, Any] | None:
    """The object in a line; None for a line that a crash has cut, or that holds none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
