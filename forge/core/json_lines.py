"""Files of lines: append and read JSON Lines, read either end of a log, follow one that grows.

JSON Lines are append-only and readable while they are written; a crash cuts at most one line.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forge.core.files import disk_trouble, open_regular

MAX_BYTES, MAX_LINE_BYTES = 2**31, 2**20


def append(path: Path, value: dict[str, Any]) -> None:
    """Append one line in a single write, so that lines of several writers never mix.

    A last line that a crash has cut is ended first. The folder must be there: a run whose directory was
    removed while it trains must not make another one. Raises ValueError for NaN and infinity, UnfitError
    when the disk cannot be written.
    """
    line = json.dumps(value, allow_nan=False) + "\n"
    with disk_trouble(path), open(path, "ab+", opener=_open) as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = "\n" + line
        file.write(line.encode())


def _open(path: str, flags: int) -> int:
    # A link in a run from elsewhere would have lines appended to any file of the user.
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def read(path: Path) -> list[dict[str, Any]]:
    """Every complete JSON object in the file, oldest first; [] without a file. Raises as `lines`."""
    return [value for line in lines(path) if (value := parse(line)) is not None]


def lines(path: Path) -> Iterator[str]:
    """The lines of a file that may come from elsewhere; none without a file. Those that are too long to
    be one of Forge's are left out. Raises DataError where it is too large, or no regular file, UnfitError
    when the disk cannot be read.
    """
    with (
        contextlib.suppress(FileNotFoundError),
        disk_trouble(path, "read"),
        open_regular(path, MAX_BYTES) as file,
    ):
        is_whole = True
        while line := file.readline(MAX_LINE_BYTES):
            ends = line.endswith(b"\n")
            if is_whole and (ends or len(line) < MAX_LINE_BYTES):
                yield line.decode(errors="replace").removesuffix("\n")
            is_whole = ends


def parse(line: str) -> dict[str, Any] | None:
    """The object in a line; None where there is none, or a crash has cut it."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def last_lines(path: Path, num_bytes: int) -> tuple[list[str], bool]:
    """The lines in the last `num_bytes` of a file, and whether there are more before them.

    ([], False) where there is no file. Raises DataError for a pipe or a device, UnfitError when the disk
    cannot be read.
    """
    try:
        with disk_trouble(path, "read"), open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            cut = size > num_bytes
            file.seek(max(0, size - num_bytes))
            text = file.read(num_bytes)
    except FileNotFoundError:
        return [], False
    if cut:
        text = text.partition(b"\n")[2]  # the first line is cut, possibly inside a character
    # The last line of a killed process may lack its newline.
    return text.decode(errors="replace").removesuffix("\n").split("\n") if text else [], cut


def first_lines(path: Path, num_bytes: int) -> list[str]:
    """The complete lines in the first `num_bytes` of a file. Raises what `last_lines` raises."""
    try:
        with disk_trouble(path, "read"), open_regular(path) as file:
            text = file.read(num_bytes)
    except FileNotFoundError:
        return []
    return text.decode(errors="replace").split("\n")[:-1]


class Follower:
    """Reads the lines that are appended to a file, once they are complete."""

    BLOCK = 2**20

    def __init__(self, path: Path, start: int = 0) -> None:
        """start: bytes of the file to skip."""
        self.path = path
        self._read = start

    def new_lines(self) -> list[str]:
        """Lines completed since the last call, at most BLOCK bytes of them; the others come next. A line
        of more bytes, such as a progress bar without newlines, comes in pieces."""
        with disk_trouble(self.path, "read"), open_regular(self.path) as file:
            file.seek(self._read)
            block = file.read(self.BLOCK)
        complete, newline, rest = block.rpartition(b"\n")
        if not newline and len(block) == self.BLOCK:
            complete = rest
        self._read += len(complete + newline)
        return complete.decode(errors="replace").split("\n") if complete or newline else []
