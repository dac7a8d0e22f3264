"""Runs of a counting program, as of any training program of a user (support/programs/count.py)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml
from support.live_run import Run
from support.repository import REPOSITORY

COUNT = Path(__file__).parent / "programs/count.py"
LAB = REPOSITORY / "config/labs/six-nodes"
GOAL = 20
TWO_RANKS = ("--machine.launcher=torchrun", "--ranks-per-node=2")
MARKS = ["state.json", "part-{rank}.json"]


def make_counting_run(folder: Path, *arguments: object, **keys: Any) -> Run:
    """A run of the counting program with these arguments. keys: of `program`."""
    values = {
        "command": [sys.executable, str(COUNT), "--steps", "{goal}", *map(str, arguments)],
        "goal": GOAL,
        "checkpoints": {"complete": MARKS, "settle_sec": 60},
        "stop": {"grace_sec": 20},
        **keys,
    }
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump({"results": str(folder), "run": "p", "program": values}))
    return Run(config, folder / "p")


def latest_step(run: Run) -> int:
    """Step of the checkpoint that `latest` names."""
    return int(run.paths.latest.readlink().name.partition("-")[2])
