"""What do ranks cost, against one process on the same two cores? Wall time a step, medians.

python -m bench.parallel [--quick] [--ranks=4]    about 60 s: `forge train` on a small run, in turns
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

FORGE = Path(sys.executable).parent / "forge"
SEQ_LEN, BATCH_SIZE = 128, 16  # the batch is the global one: the ranks share it
SKIPPED = 5  # first steps: memory is allocated, peers are met

REFERENCE = "one process, 2 threads"
BEST_KNOWN = {REFERENCE: 1.0, "DDP, 2 ranks": 1.03, "FSDP2, 2 ranks": 1.08}


def ways(num_ranks: int) -> dict[str, list[str]]:
    """What is compared, each with its options of `forge train`."""
    world = ["--machine.launcher=torchrun", f"--ranks-per-node={num_ranks}"]
    world += ["--machine.device=cpu"]
    return {
        REFERENCE: [],
        f"DDP, {num_ranks} ranks": [*world, "--train.shard=none"],
        f"FSDP2, {num_ranks} ranks": [*world, "--train.shard=all"],
    }


def forge(*arguments: str) -> None:
    done = subprocess.run([FORGE, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"forge {' '.join(arguments)} failed:\n{done.stderr}")


def prepare(folder: Path, num_steps: int) -> Path:
    """A config whose tokens are there."""
    stdlib = sysconfig.get_path("stdlib")
    inputs = [f"{stdlib}/{name}/*.py" for name in ("asyncio", "email")]
    values = {
        "results": str(folder / "results"),
        "data": str(folder / "data"),
        "tokenizer": {"vocab_size": 4096},
        "tokenize": {"inputs": inputs, "val_fraction": 0.2},
        "model": {"dim": 192, "layers": 4, "heads": 6},
        "train": {
            **{"seq_len": SEQ_LEN, "batch_size": BATCH_SIZE, "max_steps": num_steps},
            **{"log_every": 1, "eval_every": num_steps, "checkpoint_every": num_steps},
        },
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(values))  # JSON is YAML
    forge("tokenizer", str(path))
    forge("tokenize", str(path))
    return path


def step_seconds(config: Path, run: str, arguments: list[str]) -> list[float]:
    """Seconds of each step of a new run, as its metrics tell."""
    forge("train", str(config), f"--run={run}", *arguments)
    metrics = config.parent / "results" / run / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    rates = [line["tokens_per_sec"] for line in lines if line["kind"] == "train"]
    return [SEQ_LEN * BATCH_SIZE / rate for rate in rates[SKIPPED:]]


def measure(
    contenders: dict[str, list[str]], rounds: int, num_steps: int, most_sec: float
) -> dict[str, list[float]]:
    """Median seconds of a step in each round; the ways take turns. No new round after most_sec."""
    times: dict[str, list[float]] = {way: [] for way in contenders}
    with tempfile.TemporaryDirectory() as folder:
        config = prepare(Path(folder), num_steps)
        began = time.perf_counter()
        for number in range(rounds):
            if number and time.perf_counter() - began > most_sec:
                break
            for place, (way, arguments) in enumerate(contenders.items()):
                seconds = step_seconds(config, f"{number}-{place}", arguments)
                times[way].append(statistics.median(seconds))
    return times


def main() -> None:
    import pandas as pd

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--seconds", type=float, default=30, help="no new round after this time")
    parser.add_argument("--ranks", type=int, default=2, help="a divisor of 16")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("bench.parallel compares on two cores; this process may use only one")
    os.sched_setaffinity(0, cores[:2])  # inherited by all that is started
    rounds, num_steps = (1, SKIPPED + 5) if options.quick else (3, 30)
    times = measure(ways(options.ranks), rounds, num_steps, options.seconds)
    rows = [
        {
            "training": way,
            "ms a step": statistics.median(seconds) * 1e3,
            "of one process": statistics.median(
                a / b for a, b in zip(seconds, times[REFERENCE], strict=True)
            ),
            "best known": BEST_KNOWN.get(way, ""),
        }
        for way, seconds in times.items()
    ]
    print(
        f"dim 192, 4 layers, T {SEQ_LEN}, B {BATCH_SIZE}; medians over {num_steps} steps,", end=" "
    )
    print(f"then over {len(times[REFERENCE])} rounds")
    print(pd.DataFrame(rows).to_string(index=False, float_format="{:,.2f}".format))


if __name__ == "__main__":
    main()
