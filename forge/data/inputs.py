"""Input files of another program (`program.inputs`) and their digests; the digest of its code."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, Self

from forge.core.config import ResolvedConfig
from forge.core.errors import DataError
from forge.core.files import canonical, digest_bytes, digest_file, disk_trouble
from forge.core.paths import inputs_folder
from forge.core.records import Record
from forge.core.terminal import progress, say
from forge.data import corpus
from forge.data.corpus import InputFile
from forge.data.shards import MANIFEST, InputEntry

THREADS = 4
# Directories and files that are no part of a program's code, or must not be read by others.
NOT_CODE = (".git", ".env", "__pycache__", ".venv", ".snakemake")
NOT_CODE_SUFFIXES = (".pem", ".key", ".pyc")


class InputSet(Record):
    """manifest.json in `data/inputs/{id}`: the input files of a program, which stay where they are."""

    FIX: ClassVar[str] = "remove it and rerun the same command"

    root: str
    """The deepest directory that has all files: FORGE_DATA."""
    files: list[InputEntry]
    """By path below `root`."""
    digest: str
    """blake3 of the files."""

    def check_unchanged(self, folder: Path) -> None:
        """DataError for a file that was removed, or changed after the manifest in `folder` was made."""
        written = (folder / MANIFEST).stat().st_mtime_ns
        for entry in self.files:
            path = Path(self.root) / entry.name
            if not path.is_file() or path.stat().st_mtime_ns > written:
                raise DataError(
                    f"{path} has changed since its digest was made",
                    cause="the file was edited or removed",
                    fix=f"restore it; or remove {folder}, and give the run a new name",
                )

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Raises DataError where the manifest is missing or corrupt."""
        return cls.read(folder / MANIFEST)


def list_inputs(inputs: Sequence[str]) -> list[InputFile]:
    """The files that `program.inputs` names. Raises DataError for a name that matches none."""
    try:
        return corpus.list_named(inputs)
    except DataError as err:
        fix = err.fix.replace("tokenize.inputs", "program.inputs")
        what = err.what.replace("tokenize.inputs", "program.inputs")
        raise DataError(what, cause=err.cause, fix=fix) from None


def digest_inputs(config: ResolvedConfig) -> Path:
    """`forge inputs`: digest all input files; the path of `data/inputs/{id}/manifest.json`."""
    assert config.program
    path = inputs_folder(config.data, config.ids.inputs) / MANIFEST
    files = list_inputs(config.program.inputs)
    if path.exists() and InputSet.read(path).files:
        say(f"inputs: {path} is there: nothing to do")
        return path
    root = Path(os.path.commonpath([file.path.absolute().parent for file in files]))
    total = sum(file.size for file in files)
    entries = []
    with progress("inputs", total, "bytes") as report, ThreadPoolExecutor(THREADS) as pool:
        done = 0
        for file, entry in zip(
            files, pool.map(lambda file: _entry(file, root), files), strict=True
        ):
            entries.append(entry)
            done += file.size
            report(done, str(file.path))
    entries.sort(key=lambda entry: entry.name)
    digest = digest_bytes(canonical([entry.model_dump() for entry in entries]))
    InputSet(root=str(root), files=entries, digest=digest).write(path)
    say(f"inputs: {len(files)} files, {total / 2**20:,.1f} MiB in {root}")
    return path


def _entry(file: InputFile, root: Path) -> InputEntry:
    with disk_trouble(file.path, "read"):
        name = str(file.path.absolute().relative_to(root))
        return InputEntry(name=name, size=file.size, digest=digest_file(file.path))


def source_digest(folder: Path) -> str:
    """blake3 of the names and contents of a program's files, without version control, environments and
    keys."""
    found = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        is_code = not set(name.parts) & set(NOT_CODE) and path.suffix not in NOT_CODE_SUFFIXES
        if is_code and path.is_file():
            found.append((str(name), digest_file(path)))
    return digest_bytes(canonical(found))
