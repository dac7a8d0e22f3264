"""The unhealthy nodes of a run (`bad_nodes.txt`), which its next submission excludes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from forge.core.files import atomic_open
from forge.core.terminal import say


def read(path: Path) -> list[str]:
    """The names in the file, one per line; the rest of a line after # is a comment. [] without a file."""
    if not path.exists():
        return []
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


def add(path: Path, reasons: Mapping[str, str]) -> None:
    """Add nodes with their reasons. Nodes already in the file keep their line."""
    known = read(path)
    new = {node: reason for node, reason in reasons.items() if node not in known}
    if not new:
        return
    today = time.strftime("%Y-%m-%d")
    before = path.read_text() if path.exists() else ""
    with atomic_open(path, "w") as file:
        file.write(before)
        for node in sorted(new):
            file.write(f"{node}   # {today} {' '.join(new[node].split())}\n")
    say(f"{', '.join(sorted(new))}: excluded from now on, see {path}")
