"""Files of a repository on the Hugging Face hub, from its local cache where there is no network."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Self

from forge.core.errors import ConfigError, DataError, UnfitError

SCHEME = "hf://"
# The notation of huggingface_hub's HfFileSystem: a data set's name begins with `datasets/`; a revision
# with a slash is one of refs/convert/… (data sets as parquet) and refs/pr/….
REVISION = r"refs/(?:convert|pr)/[\w.-]+|[\w.-]+"
URL = re.compile(
    rf"hf://(?P<kind>datasets/)?(?P<name>[\w.-]+/[\w.-]+)@(?P<revision>{REVISION})(?:/(?P<path>.+))?"
)


@dataclass(frozen=True)
class Repo:
    """A repository at one revision."""

    name: str  # owner/name
    revision: str
    kind: str = "model"  # or "dataset"
    key: str = "program.inputs"  # config key that names it, or tokenize.inputs
    command: str = "forge inputs CONFIG"  # downloads it, on a login node

    @property
    def folder(self) -> str:
        """The repository's directory among downloads, which is its name on the hub."""
        return f"datasets/{self.name}" if self.kind == "dataset" else self.name

    def __str__(self) -> str:
        return f"{self.folder}@{self.revision}"


@dataclass(frozen=True)
class HubFiles:
    """The files of a repository that one `hf://` URL names; `pattern` may be a glob."""

    repo: Repo
    pattern: str

    @classmethod
    def parse(cls, url: str, key: str = "program.inputs") -> Self:
        """key: that has the URL. Raises ConfigError where the URL has another form."""
        match = URL.fullmatch(url)
        if not match:
            raise ConfigError(
                f"{key} has {url!r}, which names no files of the hub",
                fix="write hf://owner/name@revision/file or hf://datasets/owner/name@revision/file;"
                " file may be a glob, and is optional",
            )
        kind = "dataset" if match["kind"] else "model"
        return cls(Repo(match["name"], match["revision"], kind, key), match["path"] or "*")


def list_files(files: HubFiles) -> list[str]:
    """Names of the files in the repository, sorted. Asks the hub for a glob, not for a single name.

    Raises as `download`, and DataError for a glob that matches nothing.
    """
    if not re.search(r"[*?\[]", files.pattern):
        return [files.pattern]
    from huggingface_hub import HfApi

    repo = files.repo
    with _Failures(repo, files.pattern):
        names = HfApi().list_repo_files(repo.name, revision=repo.revision, repo_type=repo.kind)
    matching = sorted(name for name in names if fnmatch(name, files.pattern))
    if not matching:
        raise DataError(
            f"{repo.key}: no file of {repo} matches {files.pattern!r}",
            cause=f"it has {len(names)} files: {', '.join(sorted(names)[:5])} …",
            fix=f"correct {repo.key}",
        )
    return matching


def download(repo: Repo, name: str) -> Path | None:
    """Path of a file in the local cache, downloaded if it is not there; None where the repository has no
    such file. The directory above the file's name is named after the commit.

    Raises ConfigError (no such repository or revision, no access) and UnfitError (no answer).
    """
    from huggingface_hub import _CACHED_NO_EXIST, errors, hf_hub_download, try_to_load_from_cache

    revision, kind = repo.revision, repo.kind
    try:
        with _Failures(repo, name):
            return Path(hf_hub_download(repo.name, name, revision=revision, repo_type=kind))
    except errors.EntryNotFoundError:
        return None
    except UnfitError:
        cached = try_to_load_from_cache(repo.name, name, revision=revision, repo_type=kind)
        if cached is _CACHED_NO_EXIST:
            return None  # the cache has recorded that the file does not exist
        raise


def commit_of(cached: Path, name: str) -> str:
    """The commit of a file that `download` gave: the cache's paths are snapshots/{commit}/{name}."""
    return cached.parents[name.count("/")].name


class _Failures:
    """Turns the errors of the hub's client into ours. EntryNotFoundError is left to the caller."""

    def __init__(self, repo: Repo, file: str) -> None:
        self.repo, self.file = repo, file

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, err: BaseException | None, trace: object) -> None:
        from huggingface_hub import errors

        repo, key = self.repo, self.repo.key
        match err:
            case errors.RevisionNotFoundError():
                raise ConfigError(
                    f"{key}: {repo.folder} has no revision {repo.revision!r}",
                    fix="give a branch, a tag or a commit that the repository's page lists",
                ) from None
            case errors.GatedRepoError():
                raise ConfigError(
                    f"{key}: {repo.folder} is gated: its owner asks for agreement",
                    fix="agree on the repository's page, then `hf auth login` on this machine",
                ) from None
            case errors.RepositoryNotFoundError():
                raise ConfigError(
                    f"{key}: there is no repository {repo.folder}, or you may not see it",
                    cause="a misspelled name, or a private repository",
                    fix=f"correct {key}, or `hf auth login` for a private one",
                ) from None
            case errors.HFValidationError():
                raise ConfigError(f"{key}: {err}") from None
            case errors.RemoteEntryNotFoundError():
                return
            case errors.LocalEntryNotFoundError() | errors.OfflineModeIsEnabled():
                raise self._unreachable(err) from None
            case errors.HTTPError():  # of the client's HTTP library: no connection, an error of the hub
                raise self._unreachable(err) from None

    def _unreachable(self, err: BaseException) -> UnfitError:
        reason = str(err).strip().splitlines()[0]
        return UnfitError(
            f"cannot get {self.file} of {self.repo}: it is not in the local cache and the hub does not"
            " answer",
            cause=f"no network here (compute nodes work offline): {reason}",
            fix=f"on a login node: {self.repo.command}",
        )
