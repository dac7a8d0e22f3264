"""Threat: a Snakemake that no signal ends."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

# SIGTERM while the main thread holds the scheduler's lock, as `job_selector` does.
STRUCK = """
import signal, sys, threading, time
from snakemake.scheduling.job_scheduler import JobScheduler
from forge.snakemake_private import end_at_sigterm

if sys.argv[1:] == ["mended"]:
    end_at_sigterm()
scheduler = object.__new__(JobScheduler)
scheduler._lock, scheduler._open_jobs = threading.Lock(), threading.Semaphore(0)
scheduler._user_kill = None
signal.signal(signal.SIGTERM, scheduler.exit_gracefully)
print("begins", flush=True)
with scheduler._lock:
    signal.raise_signal(signal.SIGTERM)
assert scheduler._open_jobs.acquire(timeout=20)
print(scheduler._user_kill)
"""


@contextmanager
def struck(*how: str) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    line = [sys.executable, "-c", STRUCK, *how]
    with subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "begins\n"
        yield process
        process.kill()


def test_sigterm_ends_a_snakemake_that_chooses_jobs():
    with struck("mended") as process:
        assert process.wait(timeout=60) == 0
        # Not communicate(): what came with the first line is in the buffer, which that does not read.
        assert process.stdout and process.stdout.read() == "graceful\n"


def test_snakemake_still_needs_that():
    """Where this fails, Snakemake has mended its handler: remove `end_at_sigterm`."""
    with struck() as process, pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=2)
