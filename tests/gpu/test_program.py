"""Against another program whose ranks choose a backend that their device has not, or other ones than
each other: the script of config/labs/six-nodes, under `forge train`."""

from __future__ import annotations

import sys

import pytest
import yaml
from support.live_run import Run
from support.repository import REPOSITORY

from forge.core.files import read_json

LAB = REPOSITORY / "config/labs/six-nodes"
STEPS = 20


@pytest.mark.parametrize("wanted", ["auto", "gloo"])
def test_plain_ddp_script_trains_with_the_backend_of_its_command(device, tmp_path, wanted):
    if (wanted, device.type) == ("gloo", "cpu"):
        pytest.skip("on a CPU, auto is gloo")
    command = [sys.executable, "train.py", "--steps", "{goal}", "--backend", wanted]
    values = yaml.safe_load((LAB / "config.yaml").read_text())
    del values["runs"]
    values["program"] |= {"command": command, "source": str(LAB), "goal": STEPS}
    values |= {"run": "ddp", "results": str(tmp_path), "data": str(tmp_path / "data")}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(values))
    run = Run(config, tmp_path / "ddp")
    done = run.start("train", f"--machine.device={device.type}").end(180)
    assert done.code == 0, done.text
    has_nccl = wanted == "auto" and device.type == "cuda"
    where = "cuda:0" if device.type == "cuda" else "cpu"
    [log] = run.paths.logs.glob("*.0.log")
    assert f"backend={'nccl' if has_nccl else 'gloo'} device={where}" in log.read_text()
    assert read_json(run.paths.trained)["step"] == STEPS
