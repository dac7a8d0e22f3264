"""A run of 124M parameters on the GPU of this machine, by `forge train`: saves, a `kill -9` of its rank,
a restart. What it measured, as JSON: MFU of the loop, stalls and speed of saves, a cold and a warm start.

python tools/gpu_run.py OUT.json [--quick] [--seconds N]    OUT.json is renewed as more is known.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from forge.core import json_lines
from forge.core.files import read_json, write_json

# Steps, between two saves, and before the rank is killed.
FULL: dict[str, Any] = {
    "model": {"dim": 768, "layers": 12, "heads": 12},
    "train": {"seq_len": 1024, "batch_size": 32, "max_steps": 360, "checkpoint_every": 120},
    "kill_at": 250,
}
QUICK: dict[str, Any] = {
    "model": {"dim": 32, "layers": 2, "heads": 2},
    "train": {"seq_len": 32, "batch_size": 4, "max_steps": 60, "checkpoint_every": 20},
    "kill_at": 50,
}
LOG_EVERY = 10


def config(folder: Path, sizes: dict[str, Any]) -> Path:
    """The config of the run, with its tokens made."""
    values = {
        "run": "gpu",
        "data": str(folder / "data"),
        "results": str(folder / "results"),
        "tokenizer": {"vocab_size": 4096, "sample_mib": 4},
        "tokenize": {"inputs": ["python:stdlib"]},
        "model": sizes["model"],
        "train": {
            **sizes["train"],
            **{"log_every": LOG_EVERY, "eval_every": 1000, "keep_last": 5},
        },
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    for command in ("tokenizer", "tokenize"):
        forge(folder, command, str(path))
    return path


def forge(folder: Path, *arguments: str) -> None:
    with open(folder / "output.txt", "ab") as output:
        command = [sys.executable, "-m", "forge", *arguments]
        subprocess.run(command, check=True, stdout=output, stderr=output, cwd=folder)


def kill_rank(run: Path, sizes: dict[str, Any], end: float) -> int | None:
    """Kill rank 0 once it has come so far; the step. None where the run ended before."""
    while time.monotonic() < end:
        steps = [line.get("step", 0) for line in json_lines.read(run / "metrics.jsonl")]
        if max(steps, default=0) >= sizes["train"]["max_steps"]:
            return None
        if max(steps, default=0) >= sizes["kill_at"]:
            [pid] = [read_json(path)["pid"] for path in run.glob(".launch/*/rank-0.pid")]
            os.kill(pid, signal.SIGKILL)
            return max(steps)
        time.sleep(0.05)
    return None


def facts(run: Path) -> dict[str, Any]:
    """Facts that the files of the run have so far."""
    events = json_lines.read(run / "events.jsonl")
    lines = [line for line in json_lines.read(run / "metrics.jsonl") if line["kind"] == "train"]
    later = [line for line in lines if line["step"] > 2 * LOG_EVERY]  # the first wait for kernels
    starts = [each["seconds"] for each in events if each["event"] == "init"]
    saves = [each for each in events if each["event"] == "save"]
    load = [line for path in run.glob("monitor/*.jsonl") for line in json_lines.read(path)]
    return {
        "numerics": next((each["numerics"] for each in events if each["event"] == "init"), None),
        "parameters": next(
            (each["parameters"] for each in events if each["event"] == "init"), None
        ),
        "why_not_compiled": [
            each["why_not_compiled"] for each in events if each["event"] == "init"
        ],
        "mfu": median([line["mfu"] for line in later if line["mfu"] is not None]),
        "tokens_per_sec": median([line["tokens_per_sec"] for line in later]),
        "start_sec": starts,  # cold, then warm: kernels are there
        "saves": [{k: each[k] for k in ("step", "stall", "seconds", "bytes")} for each in saves],
        "save_gb_per_sec": [each["bytes"] / each["seconds"] / 1e9 for each in saves],
        "launches": [each["step"] for each in events if each["event"] == "launch"],
        "lost": [each.get("message", "") for each in events if each["event"] in ("lost", "failed")],
        "preflight": [each for each in events if each["event"] == "preflight"],
        "monitor": load[-3:],
        "last_loss": lines[-1]["loss"] if lines else None,
        "completed": any(each["event"] == "completed" for each in events),
    }


def median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def main() -> int:
    """0 where the run reached its goal after it was killed."""
    parser = argparse.ArgumentParser(prog="gpu_run.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", metavar="OUT.json", type=Path)
    parser.add_argument("--quick", action="store_true", help="a tiny model, also on a CPU")
    parser.add_argument("--seconds", type=float, default=70, help="at most (%(default)s)")
    options = parser.parse_args()
    sizes = QUICK if options.quick else FULL
    out, end = options.out.absolute(), time.monotonic() + options.seconds
    folder = Path(tempfile.mkdtemp(prefix="forge-gpu-run-"))
    run, began = folder / "results/gpu", time.monotonic()
    told: dict[str, Any] = {"killed_at": None}
    train: subprocess.Popen[bytes] | None = None
    try:
        path = config(folder, sizes)
        told["data_sec"] = time.monotonic() - began
        forge(folder, "preflight", str(path))
        with open(folder / "output.txt", "ab") as output:
            command = [
                sys.executable,
                "-m",
                "forge",
                "train",
                str(path),
                "--train.micro_batch_size=auto",
            ]
            train = subprocess.Popen(command, stdout=output, stderr=output, cwd=folder)
        told["killed_at"] = kill_rank(run, sizes, end)
        write_json(out, {**told, **facts(run)})
        train.wait(max(1.0, end - time.monotonic()))
    except (subprocess.SubprocessError, OSError, ValueError) as err:
        told["trouble"] = f"{type(err).__name__}: {err}"
    finally:
        if train and train.poll() is None:
            train.send_signal(signal.SIGTERM)
            train.wait(30)
        text = (folder / "output.txt").read_text(errors="replace").splitlines()
        told = {**told, "exit": train and train.returncode, **facts(run), "output": text[-20:]}
        write_json(out, told)
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps({key: value for key, value in told.items() if key != "output"}, indent=1))
    return 0 if told["completed"] and len(told["launches"]) > 1 else 1


if __name__ == "__main__":
    raise SystemExit(main())
