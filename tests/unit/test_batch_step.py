"""The job of a run without Snakemake. Threats: a step after one that failed, a result of an earlier start
that counts as this one's, a signal that ends the job before the ranks have saved."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from support.live_run import TINY, wait_until

from forge.flow.batch_steps import BatchStep, BatchSteps


def config_step(folder: Path, run: str, text: str = "") -> BatchStep:
    """`forge config`, which writes results/RUN/config.json. text: of its config.yaml."""
    path = folder / f"{run}.yaml"
    path.write_text(text or yaml.safe_dump({**TINY, "run": run, "data": "data"}))
    log = f"results/{run}/logs/config.log"
    return BatchStep(
        name=f"config_run {run}",
        arguments=["config", str(path), f"--log={log}"],
        inputs=[str(path)],
        outputs=[f"results/{run}/config.json"],
        logs=[log],
    )


def started(folder: Path, *steps: BatchStep, wait_sec: float = 0) -> subprocess.Popen[str]:
    path = folder / ".snakemake/forge/steps.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    BatchSteps(folder=str(folder), steps=list(steps), wait_sec=wait_sec).write(path)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "forge.batch_step", str(path)],
        cwd="/",
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def run(folder: Path, *steps: BatchStep, wait_sec: float = 0) -> tuple[int, str]:
    process = started(folder, *steps, wait_sec=wait_sec)
    output, _ = process.communicate(timeout=60)
    return process.returncode, output


def test_steps_run_in_their_order_each_with_its_own_log(tmp_path: Path) -> None:
    steps = [config_step(tmp_path, "one"), config_step(tmp_path, "two")]
    lines = [
        f"config_run {name}: {what}" for name in ("one", "two") for what in ("started", "done")
    ]
    assert run(tmp_path, *steps) == (0, "\n".join([*lines, ""]))
    for name in ("one", "two"):
        assert json.loads((tmp_path / f"results/{name}/config.json").read_text())["run"] == name
        assert (tmp_path / f"results/{name}/logs/config.log").exists()


def test_first_step_that_fails_ends_the_job_with_its_code_and_leaves_no_output(
    tmp_path: Path,
) -> None:
    bad = config_step(tmp_path, "bad", "train: {lr: fast}")
    old = tmp_path / bad.outputs[0]
    old.parent.mkdir(parents=True)
    old.write_text("of an earlier start")
    code, output = run(tmp_path, bad, config_step(tmp_path, "next"))
    assert code == 78
    assert "train.lr" in output and "train.lr" in (tmp_path / bad.logs[0]).read_text()
    assert not old.exists()
    assert not (tmp_path / "results/next/config.json").exists()


def test_input_that_is_late_is_waited_for_and_one_that_never_comes_is_named(tmp_path: Path) -> None:
    step = config_step(tmp_path, "late")
    text = (tmp_path / "late.yaml").read_text()
    (tmp_path / "late.yaml").unlink()
    code, output = run(tmp_path, step)
    assert (code, output) == (69, f"config_run late: there is no {tmp_path}/late.yaml\n")
    process = started(tmp_path, step, wait_sec=30)
    time.sleep(1)
    (tmp_path / "late.yaml").write_text(text)
    assert process.wait(30) == 0


def test_step_that_writes_no_output_fails(tmp_path: Path) -> None:
    step = config_step(tmp_path, "one").model_copy(update={"outputs": ["other.json"]})
    code, output = run(tmp_path, step)
    assert code == 69
    assert output.splitlines()[-1] == "config_run one: there is no other.json"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_ends_the_step_and_not_the_job_before_it(tmp_path: Path, number: int) -> None:
    """`forge config` of a pipe that nobody writes into waits; only its fork takes the signal."""
    os.mkfifo(tmp_path / "pipe.yaml")
    step = config_step(tmp_path, "one").model_copy(
        update={"arguments": ["config", str(tmp_path / "pipe.yaml"), "--log=waits.log"]}
    )
    process = started(tmp_path, step, config_step(tmp_path, "two"))
    wait_until((tmp_path / "waits.log").exists, "the log of the step")
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert not (tmp_path / "results/two/config.json").exists()
