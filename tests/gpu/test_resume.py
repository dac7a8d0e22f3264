"""Against a resumed run that is another one: on a GPU the state comes from pinned memory and goes back to
the device, and dropout draws from the device's generator. With train.deterministic, bit by bit."""

from __future__ import annotations

import os
import shutil
import signal

from support.live_run import wait_until

from forge.core import json_lines
from forge.core.files import read_json
from forge.launch.kernel_cache import VARIABLE

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
    trained, new_run, tmp_path, monkeypatch
):
    """Its kernels are compiled again, as on another node: other ones would give other bits."""
    kernels = tmp_path / "kernels"
    monkeypatch.setenv(VARIABLE, str(kernels))
    killed = new_run("killed")
    command = new_run("killed").start("train")
    wait_until(lambda: killed.step() >= KILLED_AFTER, f"step {KILLED_AFTER} of {killed.folder}")
    kill_the_rank(killed)
    shutil.rmtree(kernels, ignore_errors=True)
    done = command.end(180)
    assert done.code == 0, done.text
    assert killed.events("lost")
    resumed = [launch["step"] for launch in killed.events("launch")]
    assert resumed[0] == 0 < resumed[-1] < killed.step()

    assert killed.weights_digest() == trained.weights_digest()
    assert last_loss(killed) == last_loss(trained)
