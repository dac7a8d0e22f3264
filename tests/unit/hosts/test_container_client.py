"""The shell around `podman run`: Slurm signals its whole process group, and each signal must reach the
rank once. A stand-in for podman starts the process of the container here."""

import os
import signal
import subprocess
import sys

import pytest

from forge.hosts.container import RUN

# As podman: writes the pid of the container's process, and ends as that ends.
PODMAN = """#!/bin/sh
for word; do case $word in --pidfile=*) file=${word#*=} ;; esac; done
%s
exec 3<&0
setsid "$PROGRAM" -c "$CODE" <&3 &
echo $! >"$file"
echo $$ >"$file.client"
trap 'exit 1' TERM
wait $!
"""
RANK = """
import signal, sys
heard = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, _: heard.append(number))
print("up", flush=True)
while len(heard) < 2:
    signal.pause()
print(*(signal.Signals(number).name for number in heard), flush=True)
sys.exit(5)
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """start(code): the shell, whose container runs this code of Python."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "pids").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "pids"))
    monkeypatch.setenv("PROGRAM", sys.executable)
    started = []

    def run(code, before=""):
        monkeypatch.setenv("CODE", code)
        (tmp_path / "bin/podman").write_text(PODMAN % before)
        (tmp_path / "bin/podman").chmod(0o755)
        process = subprocess.Popen(
            ["sh", "-c", RUN, "podman", "IMAGE"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def test_signals_of_the_whole_group_reach_the_container_once_each(start, tmp_path):
    shell = start(RANK)
    assert shell.stdout.readline() == "up\n"
    for number in (signal.SIGCONT, signal.SIGUSR1, signal.SIGTERM):  # Slurm's, within a moment
        os.killpg(shell.pid, number)
    out, _ = shell.communicate(timeout=20)
    assert sorted(out.split()) == ["SIGTERM", "SIGUSR1"]
    assert shell.returncode == 5
    assert [path.suffix for path in (tmp_path / "pids").iterdir()] == [".client"]


def test_container_whose_client_is_killed_is_waited_for(start, tmp_path):
    """scancel signals all processes below the task, the client among them."""
    shell = start(RANK)
    assert shell.stdout.readline() == "up\n"
    [client] = (tmp_path / "pids").glob("*.client")
    os.kill(int(client.read_text()), signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        shell.wait(1)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        shell.send_signal(number)
    assert sorted(shell.communicate(timeout=20)[0].split()) == ["SIGTERM", "SIGUSR1"]
    assert shell.returncode == 1


@pytest.mark.parametrize("status", [0, 3, 143])
def test_status_of_the_container_is_that_of_the_task(start, status):
    assert start(f"raise SystemExit({status})").wait(20) == status


def test_container_reads_what_the_task_is_given(start):
    shell = start("print(input())")
    assert shell.communicate("a request\n", timeout=20)[0] == "a request\n"


def test_stop_before_there_is_a_container_ends_the_task(start):
    shell = start("print('too late')", before="echo waits; read -r line")
    assert shell.stdout.readline() == "waits\n"
    shell.send_signal(signal.SIGTERM)
    assert shell.wait(10) == 143
