"""Directories for as long as a command takes. Those of a command that was killed are removed by the next
one: checkpoints in them can fill the disk of a node."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from forge.core.files import disk_trouble, read_object_or_empty, write_json
from forge.core.process import Process

OWNER = "owner.json"  # the process that made it


@contextmanager
def scratch_directory(purpose: str) -> Iterator[Path]:
    """An empty directory in TMPDIR, `forge-PURPOSE-…/files`, which is removed afterwards. Raises
    UnfitError where the disk cannot be written, nothing where it cannot be removed: what was made in it
    is done by then, and the next command removes the rest."""
    prefix = f"forge-{purpose}-"
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        if _is_of_a_dead_process(left):
            shutil.rmtree(left, ignore_errors=True)
    place = Path(tempfile.mkdtemp(prefix=prefix))
    files = place / "files"
    try:
        with disk_trouble(files):
            write_json(place / OWNER, Process.current().to_json())
            files.mkdir()
        yield files
    finally:
        shutil.rmtree(files, ignore_errors=True)
        if not files.exists():  # else the next command has to know whose they are
            shutil.rmtree(place, ignore_errors=True)


def _is_of_a_dead_process(place: Path) -> bool:
    """Return whether this user's process that made the directory is gone. False where nobody can tell, as
    from another container or host."""
    with suppress(OSError, KeyError, TypeError, ValueError):
        status = place.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
            return Process.from_json(read_object_or_empty(place / OWNER)).life() == "gone"
    return False
