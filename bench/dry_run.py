"""How long does the workflow take before any work is done? ms a job, and seconds to start.

python -m bench.dry_run [--quick]    about 20 s; needs the artefacts of no run
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parent.parent


def timed(command: list[str]) -> tuple[float, str]:
    """Wall time in seconds, and what the command printed."""
    start = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return seconds, done.stdout + done.stderr


def dry_run(folder: Path, num_runs: int, *flags: str) -> list[str]:
    """The command that plans a sweep of runs which differ in train.seed."""
    sheet = folder / f"{num_runs}.tsv"
    rows = [f"sweep-{number:03d}\t{number}" for number in range(num_runs)]
    sheet.write_text("\n".join(["run\ttrain.seed", *rows, ""]))
    return [
        *(str(BIN / "snakemake"), "train", "--profile", "profiles/local", "-n", *flags),
        *("--config", f"runs={sheet}", f"results={folder}/results", f"data={folder}/data"),
    ]


def num_jobs(command: list[str]) -> int:
    _, text = timed(command)
    found = re.search(r"^total\s+(\d+)", text, re.MULTILINE)
    assert found, text
    return int(found[1])


def imports_torch() -> bool:
    """Whether `forge --help` imports torch."""
    command = [sys.executable, "-X", "importtime", "-m", "forge", "--help"]
    return bool(re.search(r"\| +torch$", timed(command)[1], re.MULTILINE))


def main() -> None:
    import pandas as pd

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="20 runs, once")
    options = parser.parse_args()
    many, rounds = (20, 1) if options.quick else (200, 5)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        commands = {
            "forge --help": [str(BIN / "forge"), "--help"],
            "dry run, 1 run": dry_run(folder, 1, "--quiet"),
            f"dry run, {many} runs": dry_run(folder, many, "--quiet"),
        }
        jobs = {
            "dry run, 1 run": num_jobs(dry_run(folder, 1)),
            f"dry run, {many} runs": num_jobs(dry_run(folder, many)),
        }
        seconds: dict[str, list[float]] = {what: [] for what in commands}
        for _ in range(rounds):
            for what, command in commands.items():
                seconds[what].append(timed(command)[0])
    _, one, all_runs = seconds.values()
    more_jobs = jobs[f"dry run, {many} runs"] - jobs["dry run, 1 run"]
    per_job = [(b - a) / more_jobs * 1e3 for a, b in zip(one, all_runs, strict=True)]
    rows = [
        {"what": what, "jobs": jobs.get(what, 0), "s": statistics.median(values)}
        for what, values in seconds.items()
    ]
    print(f"medians of {rounds} rounds on {len(os.sched_getaffinity(0))} cores")
    print(pd.DataFrame(rows).to_string(index=False, float_format="{:,.2f}".format))
    print(f"each further job: {statistics.median(per_job):.2f} ms (limit, a bare DAG: 1.0 ms)")
    print(f"forge --help imports torch: {'yes' if imports_torch() else 'no'}")


if __name__ == "__main__":
    main()
