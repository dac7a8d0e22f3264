"""Threat: a run of somebody else in which a file is a pipe, a device, a loop of links, a sparse file of
10 GiB, or JSON of the wrong types: each command that reads it ends with a result or a message."""

import subprocess
import sys
from pathlib import Path


def test_commands_that_read_a_run_end_within_seconds_and_in_bounded_memory(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "support.odd_files", str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["0"], done.stdout + done.stderr
