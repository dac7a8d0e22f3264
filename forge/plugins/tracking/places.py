"""Names of what trackers have in the directory of a run."""

from __future__ import annotations

from pathlib import Path

from forge.core.paths import RunPaths

SENT, TENSORBOARD, WANDB = "tracking", "tensorboard", "wandb"


def sent_folder(paths: RunPaths) -> Path:
    """Directory of the records of what each tracker has been sent."""
    return paths.root / SENT


def tensorboard_folder(paths: RunPaths) -> Path:
    return paths.root / TENSORBOARD


def wandb_folder(paths: RunPaths) -> Path:
    return paths.root / WANDB


def log_file(paths: RunPaths) -> Path:
    """The log of the process that sends. No *.log: its errors are none of the run."""
    return paths.logs / "tracking.txt"
