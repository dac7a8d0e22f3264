"""`forge inputs`: find or download the input files of another program, or download those that
`tokenize.inputs` names of a hub, and write their manifest. Files and digest of the program's code."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import ClassVar, Self

from pydantic import ValidationError

from forge.attestation.verify import MOST_NAMED, VerificationError
from forge.core.config import Config, ResolvedConfig
from forge.core.errors import ConfigError, DataError
from forge.core.file_list import FileList, described, verify
from forge.core.files import MAX_JSON_BYTES, canonical, digest_bytes, digest_file, disk_trouble
from forge.core.paths import MANIFEST, inputs_folder
from forge.core.records import Record
from forge.core.terminal import Progress, progress, say
from forge.core.tokenize_settings import Tokenize
from forge.data import corpus, hub
from forge.data.corpus import InputFile
from forge.data.hub import HubFiles
from forge.data.shards import Kind, Member, PathEntry
from forge.data.token_files import data_files

# Directories beside the manifest: of local files in a copy, and of downloads everywhere.
DATA, HUB = "data", "hub"


class InputManifest(Record):
    """manifest.json in `data/inputs/{id}`. Local files stay where they are; downloads are in
    `data/inputs/{id}/hub`."""

    FIX: ClassVar[str] = "remove it and rerun the same command"
    MAX_BYTES: ClassVar[int] = MAX_JSON_BYTES

    root: str
    """The deepest directory that has all local files; "" without any."""
    files: list[PathEntry]
    """Local files, by path below `root`."""
    hub: str
    """The directory of all downloads; "" without any."""
    downloads: list[PathEntry]
    """Files of a hub, by path below `hub`: owner/name/file or datasets/owner/name/file."""
    commits: dict[str, str]
    """Repository at the revision of the config -> commit that was downloaded."""
    digest: str
    """blake3 of names, sizes and digests of all files."""


@dataclass(frozen=True)
class InputSet:
    """The files of a manifest, where they were found or as a copy on the disk of a node."""

    kind: ClassVar[Kind] = "inputs"

    folder: Path  # of the manifest
    manifest: InputManifest
    data: str  # FORGE_DATA: the directory of the local files; "" without any
    hub: str  # FORGE_HUB: the directory of the downloads; "" without any

    @classmethod
    def open(cls, folder: Path) -> Self:
        """The files where they were found, as `data/inputs/{id}` lists them.

        Raises DataError where the manifest is missing or corrupt, and for a file that was removed or has
        another size now. `verify` checks the digests.
        """
        manifest = InputManifest.read(folder / MANIFEST)
        # Beside the manifest, wherever the project has been moved to since.
        hub = str((folder / HUB).absolute()) if manifest.downloads else ""
        return cls(folder, manifest, manifest.root, hub)._with_right_sizes()

    @classmethod
    def open_copy(cls, folder: Path) -> Self:
        """The files of a copy, all below `folder`. Raises DataError as `open`."""
        manifest = InputManifest.read(folder / MANIFEST)
        return cls(folder, manifest, *copy_folders(folder, manifest))._with_right_sizes()

    @property
    def digest(self) -> str:
        return self.manifest.digest

    @property
    def members(self) -> list[Member]:
        return [
            Member(Path(place) / entry.name, f"{name}/{entry.name}", entry.size)
            for place, name, entries in (
                (self.data, DATA, self.manifest.files),
                (self.hub, HUB, self.manifest.downloads),
            )
            for entry in entries
        ]

    @property
    def num_bytes(self) -> int:
        return sum(member.num_bytes for member in self.members)

    def verify(self, share: tuple[int, int] = (0, 1)) -> None:
        verify(self._file_lists, share)

    def check_unchanged(self) -> None:
        """DataError for a file that was removed, or changed after the manifest was made. Looks at the
        times of the files, and reads none of them."""
        written = (self.folder / MANIFEST).stat().st_mtime_ns
        for member in self.members:
            if not member.path.is_file() or member.path.stat().st_mtime_ns > written:
                raise DataError(
                    f"{member.path} has changed since its digest was made",
                    cause="the file was edited or removed",
                    fix=self._fix,
                )

    def _with_right_sizes(self) -> Self:
        for files in self._file_lists:
            files.check_sizes()
        return self

    @property
    def _fix(self) -> str:
        return f"restore it; or remove {self.folder}, and give the run a new name"

    @property
    def _file_lists(self) -> list[FileList]:
        """Local files and downloads; they may be links, in place of which files are staged."""
        listed_in, manifest = str(self.folder / MANIFEST), self.manifest
        return [
            FileList(Path(folder), {e.name: e.entry for e in entries}, listed_in, self._fix, True)
            for folder, entries in ((self.data, manifest.files), (self.hub, manifest.downloads))
        ]


def copy_folders(folder: str | Path, manifest: InputManifest) -> tuple[str, str]:
    """The directories of local files and of downloads in a copy on a node; "" for none."""
    return (
        f"{folder}/{DATA}" if manifest.files else "",
        f"{folder}/{HUB}" if manifest.downloads else "",
    )


# --- `forge inputs` ------------------------------------------------------------------------------


def list_inputs(inputs: Sequence[str], own: str = "") -> list[InputFile]:
    """The local files that `program.inputs` names, as `corpus.list_named`. Raises DataError for a name
    that matches none."""
    try:
        local = [name for name in inputs if not name.startswith(hub.SCHEME)]
        return corpus.list_named(local, own)
    except DataError as err:
        raise corpus.of_key(err, "program.inputs") from None


def of_hub(inputs: Sequence[str], key: str = "program.inputs") -> list[HubFiles]:
    """Files of a hub that the inputs of a config key name. Raises ConfigError for a malformed URL, and
    for two revisions of a repository, whose files have the same places among the downloads."""
    hub_files = [HubFiles.parse(name, key) for name in inputs if name.startswith(hub.SCHEME)]
    apart = "; or make each a source of tokenize.sources" if key == "tokenize.inputs" else ""
    first: dict[str, HubFiles] = {}
    for files in hub_files:
        other = first.setdefault(files.repo.folder, files).repo
        if other.revision != files.repo.revision:
            raise ConfigError(
                f"{key} has two revisions of a repository: {other} and {files.repo}",
                cause="downloads are at their name on the hub, which both have",
                fix="name one revision" + apart,
            )
    return hub_files


def named_inputs(config: Config) -> tuple[list[str], str]:
    """The inputs that `forge inputs` finds or downloads, and their key: all of a program; of a corpus
    those of a hub, since the others are read where they are."""
    if program := config.program:
        return program.inputs, "program.inputs"
    names = [name for name in config.tokenize.inputs if name.startswith(hub.SCHEME)]
    return names, "tokenize.inputs"


def corpus_files(config: ResolvedConfig) -> list[InputFile]:
    """The files that `tokenize.inputs` names, sorted by name; those of a hub as `forge inputs` has
    downloaded them. DataError where it has not, or where one of them has changed since."""
    local = corpus.list_files(config.tokenize, config.own_folders)
    if not config.ids.inputs:
        return data_files(local, config.tokenize)
    folder = inputs_folder(config.data, config.ids.inputs)
    if not (folder / MANIFEST).exists():
        raise DataError(
            f"the files of the hub in tokenize.inputs are not in {folder}",
            cause="they are downloaded before the corpus is read, where there is a network",
            fix="on a login node: forge inputs CONFIG",
        )
    input_set = InputSet.open(folder)
    input_set.check_unchanged()
    downloads = [
        InputFile(f"{hub.SCHEME}{entry.name}", str(Path(input_set.hub) / entry.name), entry.size)
        for entry in input_set.manifest.downloads
        if not _is_hidden(entry.name)
    ]
    _check_downloads(config.tokenize, [entry.name for entry in input_set.manifest.downloads])
    files = sorted(local + downloads, key=lambda file: file.name)
    return data_files(files, config.tokenize)


def files_by_digest(
    texts: str, option: str, stated: Sequence[tuple[str, int, str]]
) -> dict[str, InputFile]:
    """The files by blake3, each of which is one that a statement lists. texts: directory that has them,
    under whatever names, or python:stdlib. option: that has named it. stated: name, bytes and blake3 of
    each. VerificationError that names those that are missing or differ."""
    sizes = {size for _, size, _ in stated}
    try:
        there = corpus.list_named([texts])
    except DataError as err:
        raise DataError(corpus.of_key(err, option).what) from None
    found: dict[str, InputFile] = {}
    with progress("text files", len(there), "files") as update:
        for number, file in enumerate(there):
            if file.size in sizes:
                with disk_trouble(file.path, "read"):
                    found[digest_file(file.path)] = file
            update(number)
    names = {Path(file.name).name for file in there}
    wrong = [
        f"{name!r} {'differs from' if Path(name).name in names else 'is not in'} {texts}"
        for name, _, digest in stated
        if digest not in found
    ]
    if wrong:
        more = f"; {len(wrong) - MOST_NAMED} more" if len(wrong) > MOST_NAMED else ""
        raise VerificationError("; ".join(wrong[:MOST_NAMED]) + more)
    return found


def _check_downloads(settings: Tokenize, names: list[str]) -> None:
    """Apply `_check_names` to the files that were downloaded. names: of these, owner/name/file."""
    for named in of_hub(settings.inputs, "tokenize.inputs"):
        start = f"{named.repo.folder}/"
        of_repo = [name.removeprefix(start) for name in names if name.startswith(start)]
        _check_names(named, [n for n in of_repo if fnmatch(n, named.pattern)], settings.format)


def _check_names(named: HubFiles, names: list[str], kind: str) -> None:
    """Apply `corpus.check_kinds` to what a glob of the hub names. kind: tokenize.format; "" of a
    program."""
    if kind == "auto" and named.pattern not in names:
        visible = [name for name in names if not _is_hidden(name)]
        corpus.check_kinds(f"{hub.SCHEME}{named.repo}/{named.pattern}", visible)


def _is_hidden(name: str) -> bool:
    """Return whether a file is one of the repository itself, such as .gitattributes, and no text of a
    corpus."""
    return f"/{name}".find("/.") >= 0


def make_inputs(config: ResolvedConfig) -> Path:
    """`forge inputs`: download what is on a hub, and digest all input files; the path of
    `data/inputs/{id}/manifest.json`. Raises DataError, and what `hub.download` raises."""
    names, key = named_inputs(config)
    folder = inputs_folder(config.data, config.ids.inputs)
    path = folder / MANIFEST
    local, remote = list_inputs(names, config.own_folders), of_hub(names, key)
    if path.exists():
        InputSet.open(folder).check_unchanged()
        say(f"inputs: {path} is there: nothing to do")
        return path
    commits: dict[str, str] = {}
    kind = config.tokenize.format if key == corpus.INPUTS else ""
    listed = [(named, hub.list_files(named)) for named in remote]
    for named, there in listed:
        _check_names(named, there, kind)  # before hours of downloads
    to = folder / HUB
    downloads = [file for named, there in listed for file in _download(named, there, to, commits)]
    root = os.path.commonpath([_absolute(file.path).parent for file in local]) if local else ""
    total = sum(file.size for file in local + downloads)
    with progress("inputs", total, "bytes") as report:
        files = _entries(local, Path(root), report, 0)
        done = sum(file.size for file in local)
        downloaded = _entries(downloads, folder / HUB, report, done)
    InputManifest(
        root=root,
        files=files,
        hub=str((folder / HUB).absolute()) if downloads else "",
        downloads=downloaded,
        commits=commits,
        digest=_digest(files, downloaded),
    ).write(path)
    say(f"inputs: {len(local + downloads)} files, {total / 2**20:,.1f} MiB")
    return path


def _digest(files: list[PathEntry], downloads: list[PathEntry]) -> str:
    """Digest of the files. Which of them are downloads counts, too: a copy has them in another
    directory."""
    listed = {"files": files, "downloads": downloads}
    return digest_bytes(
        canonical({k: [entry.model_dump() for entry in entries] for k, entries in listed.items()})
    )


def _download(
    files: HubFiles, names: list[str], to: Path, commits: dict[str, str]
) -> list[InputFile]:
    """Put the files of these names into `to`. commits: of each repository; the first file of one
    decides, so that all its files are of one commit."""
    downloaded = []
    for name in names:
        at_commit = commits.get(str(files.repo))
        repo = replace(files.repo, revision=at_commit) if at_commit else files.repo
        cached = hub.download(repo, name)
        if cached is None:
            key = repo.key
            raise DataError(f"{key}: {files.repo} has no file {name!r}", fix=f"correct {key}")
        commits[str(files.repo)] = hub.commit_of(cached, name)
        target = to / files.repo.folder / name
        with disk_trouble(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)  # of an interrupted command
            _link(cached.resolve(), target)
        downloaded.append(InputFile(str(target), str(target), target.stat().st_size))
    say(f"inputs: {len(downloaded)} files of {files.repo}, commit {commits[str(files.repo)]}")
    return downloaded


def _link(source: Path, target: Path) -> None:
    """A second name of the cache's file where that is on the same file system, else a copy."""
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)


def _entries(files: list[InputFile], root: Path, report: Progress, done: int) -> list[PathEntry]:
    """Digests of the files, by path below `root`. done: bytes that were reported before these."""
    root = _absolute(root)
    # Two URLs may name the same file.
    names = sorted({str(_absolute(file.path).relative_to(root)) for file in files})
    entries = []
    for name, size, digest in described(root, names):
        try:
            entries.append(PathEntry(name=name, size=size, digest=digest))
        except ValidationError:
            raise DataError(
                f"the input {name!r} in {root} has a control character in its name",
                cause="such as a line break, by an error in a script",
                fix="rename the file",
            ) from None
        done += size
        report(done, str(root / name))
    return entries


def _absolute(path: Path) -> Path:
    """Without `..`, by which a name would lead out of the directory that has all files."""
    return Path(os.path.abspath(path))  # noqa: PTH100 (links stay as they are named)


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
