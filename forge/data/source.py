"""The code of another program (`program.source`): its files, and their digest."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from forge.core.files import canonical, digest_bytes, digest_file

# Directories and files that are not part of a program's code, or must not be read by others.
NOT_CODE = (".git", ".env", "__pycache__", ".venv", ".snakemake")
NOT_CODE_SUFFIXES = (".pem", ".key", ".pyc")


def source_files(folder: Path, outputs: Collection[str] = ()) -> list[Path]:
    """The files of a program's code, sorted: without version control, environments and keys, and without
    what lies behind links to directories. outputs: directories that are left out too, such as results."""
    left_out = {Path(path).resolve() for path in outputs}
    files = []
    for top, below, names in os.walk(folder):
        here = Path(top)
        below[:] = [n for n in below if n not in NOT_CODE and (here / n).resolve() not in left_out]
        files += [here / name for name in names if _is_code(here / name)]
    return sorted(files)


def _is_code(path: Path) -> bool:
    return path.name not in NOT_CODE and path.suffix not in NOT_CODE_SUFFIXES and path.is_file()


def source_digest(folder: Path, outputs: Collection[str] = ()) -> str:
    """blake3 of the names and contents of `source_files`."""
    files = source_files(folder, outputs)
    return digest_bytes(canonical([(str(p.relative_to(folder)), digest_file(p)) for p in files]))
