"""Against a resumed run that is another one: on a GPU the state comes from pinned memory and goes back to
the device, and dropout draws from the device's generator.
"""

from __future__ import annotations

import os
import signal

from support.live_run import wait_until

from forge.core import json_lines
from forge.core.files import read_json

# Of a validation loss, where the same run twice does not give the same bits: README, bf16.
TOLERANCE = 2e-2
KILLED_AFTER = 40  # steps: two checkpoints are committed


def last_loss(run):
    """The validation loss after the last step."""
    return [line for line in json_lines.read(run.paths.metrics) if line["kind"] == "eval"][-1][
        "loss"
    ]


def kill_the_rank(run):
    """`kill -9` to the process of rank 0; forge train then launches it again."""
    [pid] = [read_json(path)["pid"] for path in run.paths.launches.glob("*/rank-0.pid")]
    os.kill(pid, signal.SIGKILL)


def test_run_killed_and_resumed_ends_with_the_weights_of_an_uninterrupted_one(
    device, trained, new_run, measured
):
    killed = new_run("killed")
    again = None if device.type == "cpu" else new_run("again").start("train")
    command = new_run("killed").start("train")
    wait_until(lambda: killed.step() >= KILLED_AFTER, f"step {KILLED_AFTER} of {killed.folder}")
    kill_the_rank(killed)
    done = command.end(180)
    assert done.code == 0, done.text
    assert killed.events("lost")
    resumed = [launch["step"] for launch in killed.events("launch")]
    assert resumed[0] == 0 < resumed[-1] < killed.step()

    expected = trained.weights_digest()
    deterministic = True
    if again:
        assert again.end(180).code == 0
        deterministic = new_run("again").weights_digest() == expected
    measured("deterministic", deterministic)
    measured("same bits", killed.weights_digest() == expected)
    if deterministic:
        assert killed.weights_digest() == expected
    assert abs(last_loss(killed) - last_loss(trained)) < TOLERANCE
