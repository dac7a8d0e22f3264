"""forge.program: what a training program may import, in processes of its own as programs are."""

import os
import signal
import subprocess
import sys

LOOP = """
import sys, time
from forge.program import Run
run = Run()
assert "torch" not in sys.modules and "pydantic" not in sys.modules
step = 0
run.heartbeat(step)
print(run.resume, run.checkpoints, run.goal, flush=True)
while not run.stop_requested() and step < 1000:
    step += 1
    run.heartbeat(step)
    time.sleep(0.002)
run.saved(step)
print("stopped at", step)
"""


def start(**env):
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("FORGE_")}
    return subprocess.Popen(
        [sys.executable, "-c", LOOP], env=inherited | env, stdout=subprocess.PIPE, text=True
    )


def test_it_reads_the_run_tells_steps_and_saves_and_sees_the_stop_signal(tmp_path):
    process = start(
        FORGE_RESUME="/run/checkpoints/checkpoint-5",
        FORGE_CHECKPOINTS="/run/checkpoints",
        FORGE_GOAL="70",
        FORGE_HEARTBEAT=str(tmp_path / "beat"),
        FORGE_SAVED=str(tmp_path / "saved"),
        FORGE_STOP_SIGNAL="SIGUSR2",
    )
    said = process.stdout.readline().split()
    assert said == ["/run/checkpoints/checkpoint-5", "/run/checkpoints", "70"]
    process.send_signal(signal.SIGUSR2)
    assert process.wait(timeout=60) == 0
    step = process.stdout.read().split()[-1]
    assert (tmp_path / "beat").read_text() == (tmp_path / "saved").read_text() == step


def test_without_forge_and_on_a_full_disk_the_program_runs_on(tmp_path):
    process = start(FORGE_HEARTBEAT="/dev/full/beat")
    said, _ = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, "None checkpoints 0\nstopped at 1000\n")
