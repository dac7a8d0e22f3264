"""A directory with an exported checkpoint: written whole or not at all, recognized again; and the export
of another program's run, which copies files of its last checkpoint. No torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from forge.checkpoint import directory
from forge.checkpoint.checkpoints import not_pruned
from forge.checkpoint.directory import refuse_link
from forge.checkpoint.sealed import ProgramCheckpoints, SealedCheckpoint
from forge.core.config import use_recorded
from forge.core.errors import ConfigError, DataError
from forge.core.file_list import FileEntry, FileList
from forge.core.files import (
    RelativePath,
    disk_trouble,
    fsync_folder,
    read_json,
    read_object,
    read_object_or_empty,
    write_json,
)
from forge.core.paths import RunPaths
from forge.core.records import Exported, validated
from forge.core.terminal import progress, say
from forge.hosts.lock import lock

FORMAT = 1
MANIFEST = "forge.json"
# Keys of the lineage of another program's checkpoint that its export has.
PUBLISHED = {"run", "config_digest", "world_size", "code"}


def is_exported(target: Path, identity: dict[str, Any]) -> bool:
    """Return whether the target is this complete export. ConfigError where the target is something
    else."""
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
    entries = {name: FileEntry(None, str(digest)) for name, digest in files.items()}
    for bad in FileList(target, entries, listed_in=MANIFEST).bad_files():
        raise ConfigError(
            f"{target} is no longer as it was exported: {bad}",
            fix=f"remove {target} and rerun the command, or name another directory with --to",
        )
    return True


def exported_files(folder: Path) -> FileList:
    """The files of an export, with the digests that its forge.json has. The project's copy of the plugin
    that it names is imported. Raises DataError where there is no forge.json, or it is not one of Forge's;
    ConfigError for a plugin that the project does not have."""
    path = folder / MANIFEST
    facts = validated(_ExportFacts, read_object(path, "files"), path)
    use_recorded(facts.plugins, str(path))
    entries = {name: FileEntry(None, digest) for name, digest in facts.files.items()}
    return FileList(
        folder, entries, listed_in=MANIFEST, fix="export the run again, or copy the file again"
    )


class _ExportFacts(BaseModel):
    """Keys of forge.json that are read again."""

    files: dict[RelativePath, str]
    plugins: dict[str, str] = {}
    """Name -> digest of the plugin of the project that has the architecture."""


def record_export(target: Path) -> None:
    """Write exported.json of the run that the target, its default directory, is in; not for a merge."""
    paths = RunPaths(target.parent.parent)
    facts = read_json(target / MANIFEST)
    if "merged" in facts:
        return
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
            for path in draft.rglob("*"):
                _fsync(path)
            fsync_folder(draft)
            draft.rename(target)  # replaces an empty directory, and no other
            fsync_folder(target.parent)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)  # else a full disk would stay full
            raise


def _fsync(path: Path) -> None:
    """Make a file, or the names in a directory, survive a power failure."""
    if path.is_dir():
        fsync_folder(path)
        return
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def export_sealed(
    checkpoints: ProgramCheckpoints, patterns: Sequence[str], to: Path | None
) -> Path:
    """Copy the files that `program.export` names from the newest sealed checkpoint; the directory.

    patterns: of program.export. to: None for `export/NAME` in the run's directory. Raises DataError (no
    checkpoint, or a corrupt one), ConfigError (`to` holds something else, a pattern names no file) and
    UnfitError (cannot write).
    """
    paths, checkpoint = checkpoints.paths, checkpoints.latest()
    if checkpoint is None:
        raise DataError(
            f"{paths.root} has no sealed checkpoint",
            cause="the run has not saved one, or its config has no program.checkpoints",
            fix="train it first",
        )
    names = _names(checkpoint, patterns)
    if to is None:
        refuse_link(paths.exports)
    target = to.resolve() if to else paths.exports / checkpoint.folder.name
    files = {
        name or checkpoint.folder.name: checkpoint.manifest.files[name].digest for name in names
    }
    facts: dict[str, Any] = {"format": FORMAT, "checkpoint_digest": checkpoint.manifest.digest}
    with lock(target.parent, "export", name=f".{target.name}.lock"):
        if is_exported(target, {**facts, "files": files}):
            say(f"export of {checkpoint.folder.name} in {target}: nothing to do")
            return target
        with atomic_directory(target) as draft:
            with not_pruned(checkpoint):
                _copy(checkpoint, names, draft)
            # An export is published: the command, paths and variables stay in the seal.
            lineage = checkpoint.manifest.lineage.model_dump(mode="json", include=PUBLISHED)
            write_json(
                draft / MANIFEST, {**facts, "step": checkpoint.step, **lineage, "files": files}
            )
    say(f"exported {checkpoint.folder.name}: {len(names)} files in {target}")
    return target


def _names(checkpoint: SealedCheckpoint, patterns: Sequence[str]) -> list[str]:
    """The files to export, each of which a pattern names. ConfigError for a pattern without any."""
    there = list(checkpoint.manifest.files)
    if there == [""]:  # the checkpoint is a file
        return there
    chosen = set()
    for pattern in patterns:
        matching = {name for name in there if fnmatch(name, pattern)}
        if not matching:
            raise ConfigError(
                f"program.export: no file of {checkpoint.folder.name} matches {pattern!r}",
                cause=f"it has {', '.join(there)}",
                fix="correct program.export in the config, and rerun the workflow",
            )
        chosen |= matching
    return sorted(chosen)


def _copy(checkpoint: SealedCheckpoint, names: list[str], draft: Path) -> None:
    """Raises DataError where a file, or its copy, is not as the seal says."""
    entries = {name: checkpoint.file_list.entries[name] for name in names}
    fix = "rerun training, which resumes from the newest valid checkpoint"
    replace(checkpoint.file_list, entries=entries, fix=fix).check_sizes()
    done = 0
    with progress(
        "export", sum(checkpoint.manifest.files[name].bytes for name in names), "bytes"
    ) as update:
        for name in names:
            source = checkpoint.folder / name if name else checkpoint.folder
            target = draft / (name or checkpoint.folder.name)
            with disk_trouble(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
            done += checkpoint.manifest.files[name].bytes
            update(done, target.name)
    copies = {name or checkpoint.folder.name: entry for name, entry in entries.items()}
    for bad in FileList(draft, copies, listed_in="its seal").bad_files():
        cause = "a disk error, an interrupted copy, or an edit"
        raise DataError(f"{checkpoint.folder} is corrupt: {bad}", cause=cause, fix=fix)
