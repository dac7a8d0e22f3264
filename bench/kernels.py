"""How long until a stopped run takes its next step, with torch.compile? Seconds from launch to step.

python -m bench.kernels [--quick]    about 3 min: two ranks on this machine, in turns
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd
import yaml

from forge.core import events
from forge.core.paths import RunPaths, kernels_folder
from forge.trainer import metrics

ROUNDS = 3
LONGEST_SEC = 240.0
RANKS = ("--machine.launcher=torchrun", "--machine.device=cpu", "--ranks-per-node=2")
KEPT, LOST, EAGER = "kernels kept", "kernels lost", "not compiled"


def write_config(project: Path, *, is_quick: bool) -> Path:
    """The config of a run that no launch here completes."""
    corpus = project / "corpus"
    corpus.mkdir()
    for number in range(24):
        lines = (f"{number} times {n} is {number * n}." for n in range(1_000))
        (corpus / f"{number}.txt").write_text("\n".join(lines))
    size = {"dim": 64, "layers": 2} if is_quick else {"dim": 192, "layers": 4}
    train = {
        **{"seq_len": 128, "batch_size": 8, "max_steps": 1_000_000, "warmup_steps": 3},
        **{"log_every": 1, "eval_samples": 2, "eval_every": 10**6, "checkpoint_every": 10**6},
    }
    values = {
        "tokenizer": {"source": "train", "vocab_size": 512, "sample_mib": 1},
        "tokenize": {"inputs": [str(corpus)], "val_fraction": 0.2},
        "model": {**size, "heads": 2},
        "train": train,
    }
    path = project / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def forge(project: Path, *arguments: str) -> subprocess.Popen[str]:
    """A forge command in the project, without a user's own directory of kernels."""
    environ = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}
    # Kernels of other tasks, and of a launch whose own are lost, are not those of the measurement before.
    environ["TMPDIR"] = str(project / "node")
    command = [sys.executable, "-m", "forge", *arguments]
    return subprocess.Popen(
        command,
        cwd=project,
        env=environ,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finish(process: subprocess.Popen[str], expected: int) -> None:
    said, _ = process.communicate(timeout=LONGEST_SEC)
    if process.returncode != expected:
        raise SystemExit(f"{process.args} ended with {process.returncode}:\n{said[-3000:]}")


def launch(project: Path, run: str, *more: str) -> float:
    """Train until the first step of this launch, and stop: seconds between launch and step."""
    paths = RunPaths(project / "results" / run)
    before = len(steps(paths))
    process = forge(project, "train", "config.yaml", f"--run={run}", *RANKS, *more)
    end = time.monotonic() + LONGEST_SEC
    try:
        while len(taken := steps(paths)) == before:
            if process.poll() is not None or time.monotonic() > end:
                process.kill()
                finish(process, 75)
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        finish(process, 75)
    finally:
        process.kill()
    began = events.last(events.read(paths.events), events.Launch)
    assert isinstance(began, events.Launch)
    return taken[before].time - began.time


def steps(paths: RunPaths) -> list[metrics.TrainLine]:
    lines = metrics.read(paths.metrics) if paths.metrics.exists() else []
    return [line for line in lines if isinstance(line, metrics.TrainLine)]


def measure(project: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds by way; each round has all of them, in turn. Launches that begin a run do not count."""
    launch(project, "compiled", "--train.compile=true")
    launch(project, "eager", "--train.compile=false")
    seconds: dict[str, list[float]] = {KEPT: [], LOST: [], EAGER: []}
    for _ in range(rounds):
        seconds[KEPT].append(launch(project, "compiled", "--train.compile=true"))
        seconds[EAGER].append(launch(project, "eager", "--train.compile=false"))
        shutil.rmtree(project / kernels_folder(project / "results/compiled"))
        seconds[LOST].append(launch(project, "compiled", "--train.compile=true"))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of a tiny model")
    options = parser.parse_args()
    run(is_quick=options.quick)


def run(*, is_quick: bool) -> None:
    """Measure, and print the table."""
    if not (shutil.which("c++") or shutil.which("g++")):
        print("skipped: torch.compile needs a C++ compiler here")
        return
    rounds = 1 if is_quick else ROUNDS
    with tempfile.TemporaryDirectory(dir=".") as name:
        project = Path(name).absolute()
        write_config(project, is_quick=is_quick)
        for step in ("tokenizer", "tokenize"):
            finish(forge(project, step, "config.yaml"), 0)
        seconds = measure(project, rounds)
    rows = [
        {
            "way": way,
            "median s": statistics.median(values),
            "max s": max(values),
            "of kept": statistics.median(a / b for a, b in zip(values, seconds[KEPT], strict=True)),
        }
        for way, values in seconds.items()
    ]
    print(f"launch to first step, two ranks on a CPU, {rounds} rounds")
    print(pd.DataFrame(rows).to_string(index=False, float_format="{:,.2f}".format))


if __name__ == "__main__":
    main()
