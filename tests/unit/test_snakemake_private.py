"""Threats: a Snakemake that no signal ends; errors printed for a stop that succeeded, or an error that is
not printed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import pytest

# SIGTERM while the main thread holds the scheduler's lock, as `job_selector` does.
STRUCK = """
import signal, sys, threading, time
from snakemake.scheduling.job_scheduler import JobScheduler
from forge.flow.snakemake_private import end_at_sigterm

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


# Two jobs that end as the test says; `forge` is the script in the test's directory.
STOPPED = """
from forge.flow.snakemake_private import quiet_stops
execute = workflow.execute
def execute_quietly(*arguments, **options):
    with quiet_stops():
        return execute(*arguments, **options)
workflow.execute = execute_quietly
rule all:
    input: "a", "b"
rule a:
    output: "a"
    shell: "{a}"
rule b:
    output: "b"
    shell: "{b}"
"""
FORGE = """#!/bin/sh
trap 'exit 75' INT
[ $# = 1 ] && exit $1
touch begun-$1
while :; do sleep 0.05; done
"""
NOISE = ("RuleException", "Error in rule", "WorkflowError", "Look above", "Traceback")


@contextmanager
def started(
    place: Path, a: str, b: str, output: IO[str] | int = subprocess.PIPE
) -> Iterator[subprocess.Popen[str]]:
    """Killed behind the block, where a wait has failed: a job may have missed the signal."""
    (place / "Snakefile").write_text(STOPPED.format(a=a, b=b))
    (place / "forge").write_text(FORGE)
    (place / "forge").chmod(0o755)
    paths = {"PATH": f"{place}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "snakemake", "--cores=2", "--keep-going", "--nocolor"],
        cwd=place,
        env={**os.environ, **paths},
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # A background job of a script ignores SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    with process:
        try:
            yield process
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise


def wait_for(path: Path) -> None:
    end = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_stops_of_forge_end_with_75_and_no_error_of_snakemake(tmp_path):
    with started(tmp_path, "exec forge 75", "touch b") as process:
        output = process.communicate(timeout=120)[0]
    assert process.returncode == 75, output
    assert not [noise for noise in NOISE if noise in output]
    assert (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("other", "error"),
    [
        ("exec forge 70", "Error in rule b"),
        ("exit 75", "Error in rule b"),  # of another program it may mean anything
        ("true", "MissingOutputException"),
    ],
)
def test_failure_beside_a_stop_is_printed_and_ends_with_1(tmp_path, other, error):
    with started(tmp_path, "exec forge 75", other) as process:
        output = process.communicate(timeout=120)[0]
    assert process.returncode == 1
    assert error in output and "Look above for error messages" in output
    assert "Error in rule a" not in output


@pytest.mark.parametrize(
    "other", ["exec forge b y", "touch begun-b; exec sleep 60"], ids=["of Forge", "another's"]
)
def test_ctrl_c_prints_no_error_of_snakemake(tmp_path, other):
    with started(tmp_path, "exec forge a y", other) as process:
        for job in "ab":  # one that begins after the signal would not get it
            wait_for(tmp_path / f"begun-{job}")
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        output = process.communicate(timeout=120)[0]
    assert process.returncode == 75, output
    assert "Terminating processes on user request" in output
    assert not [noise for noise in NOISE if noise in output]


def test_more_presses_of_ctrl_c_wait_for_the_jobs_too(tmp_path):
    waits = "touch begun; until [ -e told ]; do sleep 0.05 || true; done; touch ended; exit 1"
    job = f"trap 'touch told' INT; {waits}"
    said = tmp_path / "said"
    with open(said, "w") as file, started(tmp_path, job, "exec forge 75", file) as process:
        wait_for(tmp_path / "begun")
        end = time.monotonic() + 120
        while "already stopping: waiting for the jobs to end" not in said.read_text():
            assert time.monotonic() < end
            os.kill(process.pid, signal.SIGINT)
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=120) == 1
    assert (tmp_path / "ended").exists()
    # Of a job that has failed, whenever that was.
    assert "Traceback" not in said.read_text() and "Error in rule a" in said.read_text()
