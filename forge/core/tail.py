"""Read the begin or the end of a long file, and follow a growing one."""

from __future__ import annotations

import os
from pathlib import Path

from forge.core.files import disk_trouble, open_regular


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
    """Reads the complete lines that are appended to a file."""

    BLOCK = 2**20

    def __init__(self, path: Path, start: int = 0) -> None:
        """start: bytes of the file to skip."""
        self.path = path
        self._read = start

    def new_lines(self) -> list[str]:
        """Lines completed since the last call, at most BLOCK bytes of them; the others come next."""
        with disk_trouble(self.path, "read"), open_regular(self.path) as file:
            file.seek(self._read)
            complete, newline, _ = file.read(self.BLOCK).rpartition(b"\n")
        self._read += len(complete + newline)
        return complete.decode(errors="replace").split("\n") if newline else []
