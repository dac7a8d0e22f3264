"""A directory with an exported checkpoint: written whole or not at all, recognized again. No torch."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forge.checkpoint import directory
from forge.core.errors import ConfigError
from forge.core.files import (
    digest_file,
    disk_trouble,
    fsync_folder,
    is_file_below,
    read_json,
    read_object_or_empty,
)
from forge.core.paths import RunPaths
from forge.core.records import Exported

FORMAT = 1
MANIFEST = "forge.json"


def is_exported(target: Path, identity: dict[str, Any]) -> bool:
    """Whether the target is this export, complete. ConfigError where the target is something else."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return False
    manifest = read_object_or_empty(target / MANIFEST) if (target / MANIFEST).is_file() else {}
    files = manifest.get("files")
    if not isinstance(files, dict) or any(
        manifest.get(k) != value for k, value in identity.items()
    ):
        what = (
            f"holds the export of step {manifest['step']}{_in(manifest)}"
            if "checkpoint_digest" in manifest
            else "exists and is not an export of Forge"
        )
        raise ConfigError(f"{target} {what}", fix="name another directory with --to, or remove it")
    for name, digest in files.items():
        if not is_file_below(target / name, target) or digest_file(target / name) != digest:
            raise ConfigError(
                f"{target / name} is missing or has changed since it was exported",
                fix=f"remove {target} and rerun the command, or name another directory with --to",
            )
    return True


def record_export(target: Path) -> None:
    """Write exported.json of the run that the target, its default directory, is in."""
    paths = RunPaths(target.parent.parent)
    facts = read_json(target / MANIFEST)
    folder = str(target.relative_to(paths.root))
    Exported(step=facts["step"], folder=folder, files=facts["files"]).write(paths.exported)


def _in(manifest: dict[str, Any]) -> str:
    return f" in {manifest['dtype']}" if "dtype" in manifest else ""


@contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """A temporary directory that is renamed to `target` once it is complete and on disk.

    The caller holds the target's lock. Leftovers of a killed export are removed.
    """
    draft = target.with_name(f"{directory.TEMPORARY}{target.name}")
    with disk_trouble(target):
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        try:
            yield draft
            fsync_folder(draft)
            draft.rename(target)  # replaces an empty directory, and no other
            fsync_folder(target.parent)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)  # else a full disk would stay full
            raise
