"""Another training program by one workflow command: the lab's plain DDP script, stopped and resumed."""

import os
import signal
import sys

import yaml
from support.clone import wait

CONFIG = "config/labs/six-nodes/config.yaml"


def test_ddp_script_is_stopped_resumed_validated_reported_and_reproduced(project):
    project.one_rank()
    path = project.root / CONFIG
    values = yaml.safe_load(path.read_text())
    values["program"] |= {"goal": 60, "inputs": ["corpus"], "validate": [sys.executable, "-c", "1"]}
    command = [sys.executable, "train.py", "--steps", "{goal}", "--save-every", "20"]
    values["program"]["command"] = [*command, "--sleep", "0.2"]
    path.write_text(yaml.safe_dump(values))
    process = project.start("train", "--configfile", CONFIG)
    latest = project.path("checkpoints/latest", "six-nodes")
    wait(lambda: latest.is_symlink() or process.poll() is not None)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C in a terminal
    output, _ = process.communicate(timeout=120)
    assert "sealed checkpoint-20.pt" in output
    assert "stopped" in output.splitlines()[-1], output
    code, output = project.snakemake("resume", "--configfile", CONFIG)
    assert code == 0, output
    assert "resuming from step" in output
    assert "six-nodes  validated" in output.splitlines()[-1]
    assert project.read("validated.json", "six-nodes")["step"] == 60
    checks = project.read("validation.json", "six-nodes")["checks"]
    assert [check["name"] for check in checks][-1] == "program"
    assert "checkpoint-60.pt" in project.forge("show", "six-nodes").stdout
    [manifest] = (project.root / "data/inputs").glob("*/manifest.json")
    assert "abc.txt" in manifest.read_text()
    page = project.path("report.html", "six-nodes").read_text()
    assert "train.py --steps {goal}" in page
    code, output = project.snakemake("train", "--configfile", CONFIG)
    assert (code, "Nothing to be done" in output) == (0, True)
    code, output = project.snakemake("reproduce", "--configfile", CONFIG)
    assert code == 0, output
    assert project.read("reproduced.json", "six-nodes")["steps_checked"] == 60
