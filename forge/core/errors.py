"""Errors that users see, with cause and fix, and their exit codes."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of every `forge` verb, from BSD's sysexits.h where a fitting one exists."""

    DONE = 0  # goal reached, committed, recorded
    DATA = 65  # EX_DATAERR: bad input data
    UNFIT = 69  # EX_UNAVAILABLE: a node, the fabric, the network or a disk is unfit
    FAILED = 70  # EX_SOFTWARE: training diverged, or a bug
    STOPPED = 75  # EX_TEMPFAIL: stopped early with a committed checkpoint; run it again
    CONFIG = 78  # EX_CONFIG: bad config or command line


class ForgeError(Exception):
    """A mistake or trouble that is not a bug of ours: shown without a traceback.

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
        return "\n".join(parts)


class ConfigError(ForgeError):
    """The config, the sample sheet or a command line cannot work."""

    code = Exit.CONFIG


class DataError(ForgeError):
    """Input text, shards or a checkpoint are not what they must be."""

    code = Exit.DATA


class OtherFormat(DataError):
    """A file of another version of Forge: nothing is wrong with it."""


class UnfitError(ForgeError):
    """A node, the network, a disk or memory does not serve."""

    code = Exit.UNFIT


class TrainingError(ForgeError):
    """Training went wrong by its own numbers (diverged), not by the machine."""

    code = Exit.FAILED
