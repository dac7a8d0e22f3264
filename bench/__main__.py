"""Run the measurements one after another, each in processes of its own, and print their tables."""

from __future__ import annotations

import argparse
import subprocess
import sys

PARTS = {
    "tokenization": "text to ids, per core",
    "loader": "batches",
    "train_step": "one training step",
    "parallel": "DDP and FSDP2 on two ranks",
    "save": "checkpoints: how long training waits, and until the commit",
    "kernels": "a compiled run after a requeue",
    "recovery": "from a fault to the next new step, on the test cluster",
    "validate": "digests of a checkpoint, compared",
    "stage": "shards to the disks of four nodes",
    "pipeline": "the workflow beside a hand-written sbatch script",
    "dry_run": "the workflow's own time",
    "reproducibility": "what changes the bits of a model",
    "scale": "what grows with the number of ranks, simulated",
}


def main() -> int:
    """0 where every part has measured something, else 1; the failed parts are named at the end."""
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        epilog="parts: " + " · ".join(f"{name}: {text}" for name, text in PARTS.items()),
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(PARTS)}")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}; choose from {', '.join(PARTS)}")
    failed = []
    for name in options.names or PARTS:
        print(f"\n== {name}: {PARTS[name]}", flush=True)
        if status := run([f"bench.{name}", *["--quick"] * options.quick]):
            failed.append(f"{name} (exit status {status})")
    if failed:
        print(f"\nfailed: {', '.join(failed)}", flush=True)
    return int(bool(failed))


def run(arguments: list[str]) -> int:
    """Exit status of `python -m` with these arguments; 1 where it prints nothing."""
    command = [sys.executable, "-m", *arguments]
    num_lines = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            print(line, end="", flush=True)
            num_lines += 1
    if not process.returncode and not num_lines:
        print(f"{arguments[0]} has measured nothing")
        return 1
    return abs(process.returncode)


if __name__ == "__main__":
    raise SystemExit(main())
