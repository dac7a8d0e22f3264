"""A stop reaches the ranks of torchrun however often Slurm sends it, and torchrun waits for them."""

import os
import signal
import subprocess
import sys
import time

# As torchrun: starts ranks, waits for them. As a rank: installs its handler late, and saves slowly.
RANK = """
import signal, time
time.sleep(0.5)
got = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda n, _: got.append(n))
while not got:
    time.sleep(0.02)
time.sleep(0.5)
print("saved\\n", end="", flush=True)  # one write: ranks share the pipe
"""
TORCHRUN = """
import subprocess, sys
ranks = [subprocess.Popen([sys.executable, "-c", sys.argv[1]]) for _ in range(2)]
print("ready", flush=True)
sys.exit(max(rank.wait() for rank in ranks) + int(sys.argv[2]))
"""


def start(rank, status=0):
    command = [sys.executable, "-c", TORCHRUN, rank, str(status)]
    line = [sys.executable, "-m", "forge.launch.first_signal", *command]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout.readline() == "ready\n"
    return process


def test_ranks_save_although_all_processes_get_the_signal_twice():
    process = start(RANK)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        process.send_signal(number)
        time.sleep(0.1)
    assert process.stdout.read() == "saved\nsaved\n"
    assert process.wait(60) == 0


def test_torchrun_itself_ignores_signals_that_reach_it():
    process = start(RANK)
    os.killpg(process.pid, signal.SIGTERM)  # the ranks ignore it, too: they have no handler yet
    assert process.stdout.read() == "saved\nsaved\n"
    assert process.wait(60) == 0


def test_torchrun_gets_the_number_of_its_node():
    show = "import os; print(os.environ['PET_NODE_RANK'])"
    line = [sys.executable, "-m", "forge.launch.first_signal", sys.executable, "-c", show]
    for environ, number in (({"SLURM_NODEID": "3"}, "3"), ({}, "0")):
        inherited = {k: v for k, v in os.environ.items() if k != "SLURM_NODEID"} | environ
        assert subprocess.check_output(line, env=inherited, text=True).strip() == number


def test_without_a_signal_the_status_is_that_of_the_command():
    assert start("", status=7).wait(60) == 7
