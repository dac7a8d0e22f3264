"""Files of what was retrained, in the directory of a run."""

from __future__ import annotations

from pathlib import Path

from forge.core.paths import RunPaths, checkpoint_name

REPRODUCED = "reproduced.json"
CERTIFICATES = "certificates"  # of checkpoints whose steps were retrained


def certificate_at(paths: RunPaths, step: int) -> Path:
    """Certificate that the steps up to this checkpoint were retrained."""
    return paths.root / CERTIFICATES / f"{checkpoint_name(step)}.json"


def result_at(paths: RunPaths, step: int) -> Path:
    """Result of retraining up to this checkpoint, also where there is no certificate."""
    return paths.root / CERTIFICATES / f"{checkpoint_name(step)}.result.json"
