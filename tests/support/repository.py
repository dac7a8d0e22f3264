"""REPOSITORY: a copy of the project's files, without what a user has in the clone.

An edited file, and a new one in a directory of code, are copied as they are: they are to be tested. Of
config/config.yaml and config/runs.tsv, which everybody edits who trains, the committed version is copied,
or the one of `git add`. Runs, data, own profiles and notes stay behind.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

CLONE = Path(__file__).resolve().parents[2]
# For the processes of a session, which share one copy.
PLACE = "FORGE_TEST_REPOSITORY"
EDITED_BY_USERS = ("config/config.yaml", "config/runs.tsv")
# Where a file that git does not know yet is a developer's.
CODE = (
    *("bench", "docs", "examples", "forge"),
    *("snakemake_executor_plugin_forge", "tests", "tools", "workflow"),
)


def git(clone: Path, *words: str) -> bytes:
    """The output of git, which reads only. Empty where the clone is no checkout, or git is missing."""
    command = ["git", "-c", "safe.directory=*", "-C", str(clone), *words]
    # A hook of git has variables that name another index.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(command, check=False, capture_output=True, env=variables)
    except FileNotFoundError:
        return b""
    return done.stdout


def files_of_project(clone: Path) -> Iterator[str]:
    """Relative names."""
    tracked = git(clone, "ls-files", "-z").split(b"\0")
    if b"pyproject.toml" in tracked:
        new = git(clone, "ls-files", "-z", "--others", "--exclude-standard", "--", *CODE)
        yield from filter(None, map(os.fsdecode, (*tracked, *new.split(b"\0"))))
    else:  # an unpacked source distribution
        for place in (*CODE, "config", "profiles", ".test"):
            files = (path.relative_to(clone) for path in (clone / place).rglob("*"))
            yield from (str(path) for path in files if "__pycache__" not in path.parts)
        yield from (path.name for path in clone.iterdir())


def copy_project(clone: Path, target: Path) -> None:
    for name in files_of_project(clone):
        if (clone / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(clone / name, target / name)
    for name in EDITED_BY_USERS:
        if committed := git(clone, "show", f":{name}"):
            (target / name).write_bytes(committed)


def _shared_copy() -> Path:
    if place := os.environ.get(PLACE):
        return Path(place)
    copy = Path(tempfile.mkdtemp(prefix="forge-repository-")).resolve()
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a fork may end as a process of its own
            shutil.rmtree(copy, ignore_errors=True)

    atexit.register(remove)
    copy_project(CLONE, copy)
    os.environ[PLACE] = str(copy)
    return copy


REPOSITORY = _shared_copy()
