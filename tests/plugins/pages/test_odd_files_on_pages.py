"""Threat: a run of somebody else in which a file is a pipe, a device, a loop of links, a sparse file of
10 GiB, or JSON of the wrong types: its pages are made, or end with a message."""

import subprocess
import sys
from pathlib import Path

CODE = """
import contextlib, sys
from pathlib import Path
from unittest import mock
from support.odd_files import RUN, call_all
from forge.plugins.pages import charts

# What charts show: with any other file they are those of the good run, and cost most of the time.
DRAWN = ("metrics.jsonl", "events.jsonl")
COMMANDS = (["compare", str(RUN), "results/other", "--html=compare.html"], ["report", str(RUN)])

def undrawn(name):
    patch = mock.patch.object(charts, "svg", lambda *_: "<svg/>")
    return contextlib.nullcontext() if name in DRAWN else patch

call_all(Path(sys.argv[1]), COMMANDS, undrawn)
"""


def test_commands_that_make_pages_end_within_seconds_and_in_bounded_memory(tmp_path):
    tests = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path)],
        cwd=tests,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["0"], done.stdout + done.stderr
