"""A container that outlives its client would write into a run that the next job trains."""

import os
import subprocess
import sys
import time

import psutil
import pytest
from support.live_run import wait_until

GUARD = [sys.executable, "-m", "forge.launch.container_guard"]
SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
# Starts a child of its own, and says the pids of both.
FAMILY = f"""
import os, subprocess
child = subprocess.Popen({SLEEP!r})
print(os.getpid(), child.pid, flush=True)
child.wait()
"""


@pytest.fixture
def client():
    with subprocess.Popen(SLEEP) as process:
        yield process
        process.kill()


def guarded(client_pid, *command, **options):
    environment = os.environ | {"FORGE_CONTAINER_CLIENT": str(client_pid)}
    return subprocess.Popen(
        [*GUARD, *command], env=environment, stdout=subprocess.PIPE, text=True, **options
    )


def test_command_and_what_it_has_started_are_killed_with_the_client(client):
    with guarded(client.pid, sys.executable, "-c", FAMILY) as container:
        pids = [int(word) for word in container.stdout.readline().split()]
        assert pids[0] == container.pid  # the signals of the container are for the command itself
        client.kill()
        client.wait()
        assert container.wait(20) == -9
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), "the family is gone")


def test_command_ends_as_it_would_alone_and_its_output_ends_with_it(client):
    program = "import os; print('FORGE_CONTAINER_CLIENT' in os.environ); raise SystemExit(7)"
    with guarded(client.pid, sys.executable, "-c", program) as container:
        started = time.monotonic()
        assert container.communicate(timeout=20)[0] == "False\n"
        assert container.returncode == 7
        assert time.monotonic() - started < 15


def test_command_of_a_client_that_is_gone_is_not_started(client, tmp_path):
    client.kill()
    client.wait()
    with guarded(client.pid, "touch", str(tmp_path / "started")) as container:
        assert container.wait(20) == 137
    assert not (tmp_path / "started").exists()
