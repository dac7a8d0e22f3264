"""Against a rank that somebody has stopped, and that nobody names since it looks like one that waits."""

import os
import signal
import subprocess
import sys
import threading

import pytest
from support.live_run import wait_until

from forge.core.files import write_json
from forge.core.process import Process
from forge.launch import lost_ranks
from forge.launch.heartbeat import Activity
from forge.launch.lost_ranks import StoppedRanks
from forge.launch.rank_records import RankRecord, RecordsSoFar, pid_file
from forge.launch.watchdog import provisional
from forge.slurm import slurm

WAITING = Activity(18, "all-reduce of gradients in step 18", waits=True, sec=30, stalled=True)


@pytest.fixture
def stopped(spec):
    """The process of rank 1, which is stopped; rank 0 waits for it."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        write_json(pid_file(spec, 1), Process.of(child.pid).to_json())
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        provisional(0, WAITING).write_provisional(spec)
        yield child
        child.kill()


def marked(spec):
    """The records of both ranks once rank 1 has been asked about."""
    looks, records = StoppedRanks(spec), RecordsSoFar(spec)

    def asked():
        records.look()
        looks.look(records.stalled)
        return (spec.directory / "rank-1.stopped").exists()

    wait_until(asked, "what is known of rank 1")
    return [RankRecord.read(spec, rank) for rank in range(2)]


def test_rank_whose_process_is_stopped_is_named_with_its_pid_after_slurm_has_continued_it(
    spec, stopped
):
    found = marked(spec)
    assert [record.stopped for record in found] == [None, stopped.pid]
    os.kill(stopped.pid, signal.SIGCONT)
    # It had waited for longer than its limit, too, as its own clock says.
    RankRecord("failed", 1, 69, cause="peer lost", host="n1", activity=WAITING).write(spec)
    found = lost_ranks.judged([RankRecord.read(spec, rank) for rank in range(2)])
    assert found.message.startswith(
        "rank 1 of 2 on n1 did not arrive at the all-reduce of gradients in step 18: stopped by SIGSTOP"
        f" (pid {stopped.pid}, state T); rank 0 saw: "
    )
    assert (found.cause, found.host) == ("hang", "n1")


def test_rank_that_is_only_busy_is_not_called_stopped(spec, stopped):
    os.kill(stopped.pid, signal.SIGCONT)
    assert [record.stopped for record in marked(spec)] == [None, None]


def test_node_of_another_host_is_asked_by_srun(spec, stopped, monkeypatch):
    process = Process.of(stopped.pid)
    far = {**process.to_json(), "host": "n7"}
    write_json(pid_file(spec, 1), far)
    spec = spec.model_copy(update={"job": "42"})
    with open(f"/proc/{stopped.pid}/stat") as file:
        stat = file.read()
    commands = []

    def run_step(command, **_):
        commands.append((command, threading.current_thread().name))
        return stat, ""

    monkeypatch.setattr(slurm, "run_step", run_step)
    assert marked(spec)[1].stopped == stopped.pid
    [(command, thread)] = commands
    assert "--nodelist=n7" in command and command[-2:] == ["cat", f"/proc/{stopped.pid}/stat"]
    assert thread != "MainThread"  # the launcher passes signals on meanwhile
