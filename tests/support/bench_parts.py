"""Run a part of the bench at its smallest size, to its numbers."""

import re
import subprocess
import sys

from support.repository import REPOSITORY

from bench.__main__ import PARTS

ON_SLURM = {"stage", "pipeline", "recovery"}  # each brings up a test cluster of its own


def measured(part: str, timeout_sec: float) -> str:
    """What `python -m bench PART --quick` prints, which has numbers in it."""
    command = [sys.executable, "-m", "bench", part, "--quick"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=REPOSITORY, timeout=timeout_sec
    )
    assert done.returncode == 0, done.stdout + done.stderr
    _, _, table = done.stdout.partition(f"{part}: {PARTS[part]}\n")
    assert re.search(r"\d\.\d", table), f"no numbers:\n{done.stdout}"
    return table
