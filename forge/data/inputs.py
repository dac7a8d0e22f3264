"""Input files of another program (`program.inputs`) and their digests; the digest of its code."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Self

from forge.core.config import ResolvedConfig
from forge.core.errors import DataError
from forge.core.files import canonical, digest_bytes, digest_file, disk_trouble
from forge.core.paths import inputs_folder
from forge.core.records import Record
from forge.core.terminal import Progress, progress, say
from forge.data import corpus, hub
from forge.data.corpus import InputFile
from forge.data.hub import HubFiles
from forge.data.shards import MANIFEST, InputEntry

HUB = "hub"  # directory of downloads, beside the manifest
THREADS = 4
# Directories and files that are no part of a program's code, or must not be read by others.
NOT_CODE = (".git", ".env", "__pycache__", ".venv", ".snakemake")
NOT_CODE_SUFFIXES = (".pem", ".key", ".pyc")


class InputSet(Record):
    """manifest.json in `data/inputs/{id}`: the input files of a program. Local ones stay where they are;
    those of a hub are in `data/inputs/{id}/hub`."""

    FIX: ClassVar[str] = "remove it and rerun the same command"

    root: str
    """The deepest directory that has all local files: FORGE_DATA; "" without any."""
    files: list[InputEntry]
    """Local files, by path below `root`."""
    hub: str
    """The directory of all downloads: FORGE_HUB; "" without any."""
    downloads: list[InputEntry]
    """Files of a hub, by path below `hub`: owner/name/file or datasets/owner/name/file."""
    commits: dict[str, str]
    """Repository at the revision of the config -> commit that was downloaded."""
    digest: str
    """blake3 of names, sizes and digests of all files."""

    @property
    def paths(self) -> list[Path]:
        """All files."""
        local = [Path(self.root) / entry.name for entry in self.files]
        return local + [Path(self.hub) / entry.name for entry in self.downloads]

    def check_unchanged(self, folder: Path) -> None:
        """DataError for a file that was removed, or changed after the manifest in `folder` was made."""
        written = (folder / MANIFEST).stat().st_mtime_ns
        for path in self.paths:
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
    """The local files that `program.inputs` names. Raises DataError for a name that matches none."""
    try:
        return corpus.list_named([name for name in inputs if not name.startswith(hub.SCHEME)])
    except DataError as err:
        fix = err.fix.replace("tokenize.inputs", "program.inputs")
        what = err.what.replace("tokenize.inputs", "program.inputs")
        raise DataError(what, cause=err.cause, fix=fix) from None


def of_hub(inputs: Sequence[str]) -> list[HubFiles]:
    """What `program.inputs` names of a hub. Raises ConfigError for a malformed URL."""
    return [HubFiles.parse(name) for name in inputs if name.startswith(hub.SCHEME)]


def make_inputs(config: ResolvedConfig) -> Path:
    """`forge inputs`: download what is on a hub, and digest all input files; the path of
    `data/inputs/{id}/manifest.json`. Raises DataError, and what `hub.download` raises."""
    assert config.program
    folder = inputs_folder(config.data, config.ids.inputs)
    path = folder / MANIFEST
    local, remote = list_inputs(config.program.inputs), of_hub(config.program.inputs)
    if path.exists():
        made = InputSet.open(folder)
        made.check_unchanged(folder)
        say(f"inputs: {path} is there: nothing to do")
        return path
    commits: dict[str, str] = {}
    downloads = [file for files in remote for file in _download(files, folder / HUB, commits)]
    root = os.path.commonpath([file.path.absolute().parent for file in local]) if local else ""
    total = sum(file.size for file in local + downloads)
    with progress("inputs", total, "bytes") as report:
        files = _entries(local, Path(root), report, 0)
        done = sum(file.size for file in local)
        downloaded = _entries(downloads, folder / HUB, report, done)
    InputSet(
        root=root,
        files=files,
        hub=str((folder / HUB).absolute()) if downloads else "",
        downloads=downloaded,
        commits=commits,
        digest=digest_bytes(canonical([e.model_dump() for e in files + downloaded])),
    ).write(path)
    say(f"inputs: {len(local + downloads)} files, {total / 2**20:,.1f} MiB")
    return path


def _download(files: HubFiles, to: Path, commits: dict[str, str]) -> list[InputFile]:
    """Put the files into `to`. commits: of each repository; the first file of one decides, so that all
    its files are of one commit."""
    found = []
    for name in hub.list_files(files):
        at_commit = commits.get(str(files.repo))
        repo = replace(files.repo, revision=at_commit) if at_commit else files.repo
        cached = hub.download(repo, name)
        if cached is None:
            raise DataError(
                f"program.inputs: {files.repo} has no file {name!r}", fix="correct program.inputs"
            )
        commits[str(files.repo)] = hub.commit_of(cached, name)
        target = to / files.repo.folder / name
        with disk_trouble(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)  # of an interrupted command
            _link(cached.resolve(), target)
        found.append(InputFile(str(target), target, target.stat().st_size))
    say(f"inputs: {len(found)} files of {files.repo}, commit {commits[str(files.repo)]}")
    return found


def _link(source: Path, target: Path) -> None:
    """A second name of the cache's file where that is on the same file system, else a copy."""
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)


def _entries(files: list[InputFile], root: Path, report: Progress, done: int) -> list[InputEntry]:
    """Digests of the files, by path below `root`. done: bytes that were reported before these."""
    entries = []
    with ThreadPoolExecutor(THREADS) as pool:
        digested = pool.map(lambda file: _entry(file, root.absolute()), files)
        for file, entry in zip(files, digested, strict=True):
            entries.append(entry)
            done += file.size
            report(done, str(file.path))
    # Two URLs may name the same file.
    return sorted({entry.name: entry for entry in entries}.values(), key=lambda entry: entry.name)


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
