"""Errors that users see, with cause and fix, and their exit codes."""

from __future__ import annotations

from enum import IntEnum

from forge.core.terminal import visible


class Exit(IntEnum):
    """Exit codes of every `forge` subcommand, from BSD's sysexits.h where one fits."""

    DONE = 0  # goal reached, committed, recorded
    DATA = 65  # EX_DATAERR: bad input data
    UNFIT = 69  # EX_UNAVAILABLE: a node, the fabric, the network or a disk is unhealthy
    FAILED = 70  # EX_SOFTWARE: training diverged, or a bug
    STOPPED = 75  # EX_TEMPFAIL: stopped early with a committed checkpoint; rerun the command
    CONFIG = 78  # EX_CONFIG: bad config or command line


class ForgeError(Exception):
    """An error that is not a bug of Forge, shown without a traceback.

    what: what is wrong, with the actual values. cause: the likely cause. fix: what to do.
    """

    code = Exit.FAILED

    def __init__(self, what: str, *, cause: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what, self.cause, self.fix = what, cause, fix

    def __str__(self) -> str:
        parts = [self.what]
        if self.cause:
            parts.append(f"  cause: {self.cause}")
        if self.fix:
            parts.append(f"  fix:   {self.fix}")
        return visible("\n".join(parts))


class ConfigError(ForgeError):
    """The config, the sample sheet or the command line is invalid."""

    code = Exit.CONFIG


class DataError(ForgeError):
    """Input text, shards, a checkpoint or a record is missing, invalid or corrupt."""

    code = Exit.DATA


class OtherFormat(DataError):
    """A file of another version of Forge: nothing is wrong with it."""

    @classmethod
    def of(cls, what: object, number: object, expected: int, *, fix: str) -> OtherFormat:
        """what: the file, for people. number: of its format."""
        return cls(
            f"{what} has format {number!r}, this version of Forge reads {expected}",
            cause="written by another version of Forge",
            fix=fix,
        )


# `fix` for a file of a run that no step writes again.
USE_THAT_VERSION = "use that version for this run, or start again under a new run name"


class UnfitError(ForgeError):
    """A node, the network, a disk, memory or Slurm is unavailable or insufficient."""

    code = Exit.UNFIT


class DiskFull(UnfitError):
    """A disk, or the user's quota on it, is full."""


class TrainingError(ForgeError):
    """Training diverged, or makes no progress."""

    code = Exit.FAILED
