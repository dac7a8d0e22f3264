"""Threat: a storm that measures nothing: an event that did not happen, a run that never retrained."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.storm import raw, score
from bench.storm.score import Wrong
from tools.slurm_cluster.cluster import REPOSITORY

from .conftest import require_slurm

pytestmark = pytest.mark.tools

TRACE = '{"source": "by hand", "events": [{"at": 30, "kind": "killed-rank"}]}'


def storm(*arguments: str | Path) -> str:
    command = [sys.executable, "-m", "bench.storm", *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=REPOSITORY, timeout=580
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.weekly
def test_quick_storm_leaves_a_raw_file_of_a_run_that_was_hit_and_trained_on(tmp_path: Path) -> None:
    """Two minutes of storm: a busy machine trains again within 90 s."""
    require_slurm()
    (tmp_path / "trace.json").write_text(TRACE)
    wanted = ("--quick", "--contender", "forge", "--seeds", "1", "--minutes", "2")
    where = ("--results", tmp_path, "--trace", tmp_path / "trace.json")
    assert "| forge: Forge around the same program | 1 | 1, 0 |" in storm(*wanted, *where)
    [seen] = raw.read_all(tmp_path)
    [hit] = score.landed(seen)
    assert hit.kind == "killed-rank"
    first, again = seen.launches
    assert again.start > first.start
    assert again.start + len(again.times) > first.start + len(first.times)
    assert score.wrong(seen) == Wrong()
    assert "is there already" in storm(*wanted, *where)
