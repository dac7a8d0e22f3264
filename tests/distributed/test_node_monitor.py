"""Against a monitor that outlives its ranks, that stops them, or that a killed rank leaves without
lines: real ranks, real numbers of this machine."""

from __future__ import annotations

import os
import signal

import psutil
import pytest
from support.live_run import TWO_RANKS, living, wait_until

from forge.core import json_lines
from forge.core.process import hostname

OFTEN = "--machine.monitor.every_sec=0.2"


@pytest.fixture(autouse=True)
def launches():
    """Ranks that the launcher starts itself."""


def processes(module):
    found = []
    for process in living():
        try:
            found += [process] if module in process.cmdline() else []
        except psutil.Error:
            continue
    return found


def lines(run):
    return json_lines.read(run.paths.monitor / f"{hostname()}.jsonl")


@pytest.fixture(scope="module")
def monitored(session_runs):
    """A run whose ranks were killed with kill -9 after some lines, then rerun to its goal."""
    run = session_runs("monitored", *TWO_RANKS, OFTEN)
    started = run.start("train", "--train.max_steps=1000000", "--train.decay_steps=1000000")
    wait_until(lambda: len(lines(run)) >= 5 and run.step() > 0, "lines are written")
    watching = processes("forge.launch.monitor")
    for rank in processes("forge.worker"):
        os.kill(rank.pid, signal.SIGKILL)
    wait_until(lambda: not any(each.is_running() for each in watching), "the monitor ends")
    for each in living():
        each.kill()
    started.process.wait()
    return run, len(watching)


def test_one_process_a_node_ends_with_its_rank(monitored):
    _, number = monitored
    assert number == 1


def test_lines_have_rising_times_and_counters(monitored):
    run, _ = monitored
    written = [line for line in lines(run) if line["launch"] == lines(run)[0]["launch"]]
    times = [line["time"] for line in written]
    assert times == sorted(times) and len(set(times)) == len(times)
    assert times[-1] - times[0] == pytest.approx(0.2 * (len(times) - 1), rel=1)
    for name in ("received", "sent"):
        assert [line[name] for line in written] == sorted(line[name] for line in written)
    assert all(line["memory_gib"] > 0 and line["gpu_watts"] == [] for line in written)


def test_a_monitor_that_cannot_write_costs_training_nothing(session_runs):
    run = session_runs("blocked", *TWO_RANKS, OFTEN)
    run.folder.mkdir(parents=True)
    run.paths.monitor.write_text("in the way")
    assert run.forge("train").code == 0
    logs = "".join(path.read_text() for path in run.paths.logs.glob("*.log"))
    assert "warning: monitor: " in logs and "training is not affected" in logs
