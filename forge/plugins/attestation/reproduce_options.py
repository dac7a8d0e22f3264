"""Options of `forge reproduce`, checked before hours of training."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from forge.attestation import verify
from forge.core.errors import ConfigError
from forge.core.files import read_object_or_empty
from forge.core.paths import RunPaths

MOST_INTERVALS = 10_000
MOST_MINUTES = 10**7  # of max_minutes in machine.yaml


@dataclass(frozen=True)
class ReproduceOptions:
    """Options of the user. run: the one whose last export it is, where the user has named that.
    texts: as for `verify_texts`; None: the tokens in `data`. checkpoints: the directory of a run; None:
    all runs of the project. intervals: how many are drawn, by `seed`; None for
    one that is chosen now. whole: all steps instead, from the first on. code: a checkout of Forge.
    minutes: that an interval may take. to: the certificate; None: beside the folder. sign: a private
    key. checkpoint: the one of a run that the user has named, of which the folder is an export: then the
    interval that ends with it is retrained, and no other. trust_program: whether another program may
    be run: that of the project's config of the run, or of `config`, the file of --config."""

    folder: Path
    data: Path
    run: RunPaths | None = None
    texts: str | None = None
    checkpoints: Path | None = None
    intervals: int = 3
    whole: bool = False
    seed: int | None = None
    code: Path | None = None
    minutes: float = 60.0
    key: Path | None = None
    digest: str | None = None
    to: Path | None = None
    sign: Path | None = None
    checkpoint: Path | None = None
    trust_program: bool = False
    config: str | None = None

    @property
    def named(self) -> Path:
        """The directory that the user has named."""
        return self.checkpoint or self.folder

    @property
    def is_drawn(self) -> bool:
        """Return whether the intervals are drawn, by `seed`."""
        return not self.whole and self.checkpoint is None

    @property
    def certificate(self) -> Path:
        folder = self.folder.absolute()
        return self.to or folder.with_name(f"{folder.name}.certificate.json")

    @property
    def statement_copy(self) -> Path:
        """Path at which the statement of a checkpoint is kept, whose export is not."""
        name = self.certificate.name.removesuffix(".json")
        return self.certificate.with_name(f"{name}.statement.json")


def check(request: ReproduceOptions) -> None:
    """ConfigError for a path or a number of the command line that cannot be right, and for a directory
    that is no export."""
    if not request.folder.exists():
        raise ConfigError(
            f"{request.folder} does not exist",
            fix="name the directory of an export, of a run, such as results/base, or of a checkpoint,"
            " such as results/base/checkpoints/latest",
        )
    _check_export(request)
    check_values(request)


def _check_export(request: ReproduceOptions) -> None:
    if not (request.folder / verify.STATEMENT).is_file():
        is_run = RunPaths(request.folder).checkpoints.is_dir()
        first = f"forge export {request.folder}, and rerun this command; or " if is_run else ""
        raise ConfigError(
            f"{request.folder} has no {verify.STATEMENT}",
            cause="a run that was not exported"
            if is_run
            else "it is no export, or one of an older Forge",
            fix=f"{first}name the directory that `forge export` has made, such as my-model",
        )


def check_values(request: ReproduceOptions) -> None:
    """ConfigError for a path or a number beside the directory, and for the name of the certificate."""
    for path in filter(None, (request.key, request.checkpoints, request.code)):
        if not path.exists():
            raise ConfigError(f"{path} does not exist")
    if not 1 <= request.intervals <= MOST_INTERVALS:
        raise ConfigError(
            f"--intervals is {request.intervals}, but must be from 1 to {MOST_INTERVALS:,}",
            fix="--whole retrains all steps",
        )
    if not 0 < request.minutes <= MOST_MINUTES:
        raise ConfigError(
            f"--minutes is {request.minutes:g}, but must be more than 0, and at most {MOST_MINUTES:,}"
        )
    if request.code and not (request.code / "forge/__init__.py").is_file():
        raise ConfigError(
            f"--code is {request.code}, which is no checkout of Forge: it has no forge/__init__.py",
            fix="git worktree add ../forge-then COMMIT, in a clone of Forge, and name that directory",
        )
    _check_target(request.certificate, request.folder)


def _check_target(path: Path, folder: Path) -> None:
    """ConfigError where the certificate cannot or must not be written, before hours of training."""
    why = ""
    if path.resolve().is_relative_to(folder.resolve()):
        why = "is in the directory that is certified, and would make its verification fail"
    elif not os.access(path.parent, os.W_OK):
        why = "cannot be written: its directory is not there, or you may not write in it"
    elif path.exists() and read_object_or_empty(path).get("predicateType") != verify.REPRODUCTION:
        why = "is there, and is no certificate"
    if why:
        raise ConfigError(f"the certificate {path} {why}", fix="name another file: --to FILE")
