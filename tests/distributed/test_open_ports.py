"""Against other users of the node, and the network: who could connect to the store of ranks could write a
pickle into it, which torchrun's dynamic rendezvous ran as the user of the run."""

from __future__ import annotations

import contextlib
import ipaddress
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from support import forked
from support.live_run import TWO_RANKS, ranks, wait_until

from forge.core.errors import Exit

HOSTILE_CLIENT = Path(forked.__file__).parent / "hostile_client.py"
ENDLESS = ("--train.max_steps=1000000", "--train.decay_steps=1000000")


@pytest.fixture
def launches():
    """Here ranks are really launched, but for those that a test forks."""


def listening(processes):
    """(address, port) at which these processes listen."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            connections = process.net_connections("tcp")
            found |= {tuple(c.laddr) for c in connections if c.status == psutil.CONN_LISTEN}
    return found


def tree(pid):
    """The process and all that it has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def assert_loopback(found):
    assert found, "nobody listened, so the test would prove nothing"
    assert [host for host, _ in found if not ipaddress.ip_address(host).is_loopback] == []


def seen_until_the_end(started):
    """Where a command and its ranks have listened."""
    found = set()
    while started.process.poll() is None:
        found |= listening(tree(started.process.pid))
        time.sleep(0.05)  # ranks are there for seconds
    return found


def test_two_runs_at_once_listen_to_this_host_alone_and_run_nothing_for_another_user(
    runs, tmp_path
):
    training = [runs("one", *ENDLESS), runs("two", *ENDLESS)]
    started = [run.start("train", *TWO_RANKS) for run in training]
    for run in training:
        wait_until(lambda run=run: run.step() >= 3, f"a step of {run.folder}")
    one, two = (listening(tree(command.process.pid)) for command in started)
    assert_loopback(one)
    assert_loopback(two)
    assert not one & two
    for rank in ranks():  # torchrun goes on; they find the pickles later
        rank.suspend()
    marker = tmp_path / "ran"
    ports = [str(port) for _, port in one | two]
    client = subprocess.run(
        [sys.executable, HOSTILE_CLIENT, marker, *ports],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "2 stores" in client.stdout
    for rank in ranks():
        rank.resume()
    for command in started:
        command.process.send_signal(signal.SIGTERM)
    codes = {command.end().code for command in started}
    assert codes <= {Exit.STOPPED, Exit.UNFIT, Exit.FAILED}
    assert not marker.exists()


@pytest.mark.parametrize("verb", ["preflight", "validate"])
def test_ranks_of_other_commands_listen_to_this_host_alone(verb, solo, runs):
    run = runs("ports")
    validated = ["validate", str(solo.folder), solo.data]
    words = validated if verb == "validate" else run.arguments(verb, *TWO_RANKS)
    started = run.launch(words)
    assert_loopback(seen_until_the_end(started))
    assert started.end().code == 0


def test_ranks_of_one_node_without_torchrun_listen_to_this_host_alone(runs):
    """As under srun: rank 0 has the store."""
    run = runs("forked", *ENDLESS)
    command = run.fork("train", *TWO_RANKS)
    wait_until(lambda: run.step() >= 3, "a step")
    assert_loopback(listening(forked.session(command.process.pid)))
    command.kill()
