"""What does the workflow cost beside a hand-written sbatch script that does the same? Seconds.

python -m bench.pipeline [--quick]    about 6 min; brings up the test cluster, so needs root and Slurm
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from tools.slurm_cluster.cluster import REPOSITORY, Cluster, base_folder, why_not
from tools.slurm_cluster.settings import Settings
from tools.slurm_cluster.temporary import temporary_cluster

ROUNDS = 3
STEPS = 800  # of training: 40 s on two cores
QUICK_STEPS = 20
LONGEST_SEC = 300.0
# A model that takes no time, on a corpus that takes little: what remains is what starts and checks it.
VALUES: dict[str, Any] = {
    "tokenizer": {"vocab_size": 300, "sample_mib": 1},
    "model": {"dim": 32, "layers": 2, "heads": 2, "ffn_dim": 64},
    "train": {"seq_len": 16, "batch_size": 4, "warmup_steps": 3, "eval_samples": 8},
    "report": {"prompts": ["the "], "sample_tokens": 4},
    "data": "data",
}
# What a person would write: one job, the same subcommands one after the other, two ranks on two nodes.
SCRIPT = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --mem=1800 --time=10 --output=job.out
set -e
run="{project}/config/config.yaml --data=$PWD/data --results=$PWD/results --run=base"
ranks="--machine={project}/profiles/slurm-cpu/machine.yaml --nodes=2 --ranks-per-node=1"
forge tokenizer $run
forge tokenize $run --workers=2
forge stage $run $ranks
forge preflight $run $ranks
forge train $run $ranks
forge validate $PWD/results/base/config.json
forge report $PWD/results/base/config.json
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round instead of three")
    options = parser.parse_args()
    if reason := why_not():
        print(f"skipped: {reason}")
        return
    rounds, steps = (1, QUICK_STEPS) if options.quick else (ROUNDS, STEPS)
    with temporary_cluster(base_folder(), f"bench-{os.getpid()}", Settings(nodes=4)) as cluster:
        rows = [measure(cluster, number, steps) for number in range(rounds)]
    print(pd.DataFrame(rows).round(1).to_string(index=False))
    for name, text in (("snakemake", "all"), ("in jobs", "only what ran inside of jobs")):
        ratio = statistics.median(row[name] / row["script"] for row in rows)
        print(f"workflow / script, {text}: {ratio:.2f} (median of {rounds})")


def measure(cluster: Cluster, number: int, steps: int) -> dict[str, float]:
    """One round: the workflow, then the script, from nothing to the report."""
    folder = cluster.folder / "scratch" / f"round{number}"
    project = make_project(folder / "project", steps)
    started = time.time()
    jobs = run_workflow(cluster, project)
    seconds = time.time() - started
    running = sum(end - start for start, end in (job_times(cluster, job) for job in jobs))
    started = time.time()
    run_script(cluster, folder / "by-hand", project)
    return {
        "snakemake": seconds,
        "in jobs": running,
        "queue, polling, login node": seconds - running,
        "script": time.time() - started,
    }


def make_project(
    folder: Path,
    steps: int,
    *,
    train: Mapping[str, object] = {},
    train_run: Mapping[str, object] = {},
) -> Path:
    """A project as a user has it, with a corpus of its own and the profile slurm-cpu, edited for the
    test cluster. train, train_run: other keys of that section, and of the run's allocation."""
    for part in ("workflow", "profiles"):
        shutil.copytree(REPOSITORY / part, folder / part)
    corpus = folder / "corpus"
    corpus.mkdir()
    for number in range(24):
        words = (f"{number * word % 97} times {word} is the word" for word in range(60))
        (corpus / f"{number:02}.txt").write_text(", ".join(words))
    tokenize = {"inputs": [str(corpus)], "val_fraction": 0.3}
    every = max(20, steps // 4)
    of_train = VALUES["train"] | {"max_steps": steps, "checkpoint_every": every, **train}
    (folder / "config").mkdir()
    values = {**VALUES, "tokenize": tokenize, "train": of_train}
    (folder / "config/config.yaml").write_text(yaml.safe_dump(values))
    (folder / "config/runs.tsv").write_text("run\nbase\n")
    profile = folder / "profiles/slurm-cpu/config.yaml"
    options = yaml.safe_load(profile.read_text())
    options["default-resources"] |= {
        "slurm_account": "root",
        "slurm_partition": "main",
        "mem_mb": 1800,
    }
    options["set-threads"] = dict.fromkeys(options["set-threads"], 2)
    options["set-resources"]["train_run"] |= {
        **{"slurm_partition": "main", "nodes": 2, "tasks_per_node": 1, "cpus_per_task": 1},
        **{"mem_mb": 1800, "runtime": 10, **train_run},
    }
    profile.write_text(yaml.safe_dump(options))
    return folder


def run_workflow(cluster: Cluster, project: Path) -> list[str]:
    """Run the target train on the login node; the ids of its Slurm jobs."""
    command = ("snakemake", "--profile", "profiles/slurm-cpu", "train")
    done = cluster.popen(*command, cwd=project)
    try:
        said, _ = done.communicate(timeout=LONGEST_SEC)
    except subprocess.TimeoutExpired:
        done.kill_group()
        raise SystemExit(f"the workflow has not ended after {LONGEST_SEC:.0f} s") from None
    if done.returncode:
        raise SystemExit(f"the workflow failed with status {done.returncode}:\n{said[-3000:]}")
    return re.findall(r"submitted with SLURM jobid (\d+)", said)


def run_script(cluster: Cluster, folder: Path, project: Path) -> None:
    """Submit the hand-written script and wait for its end."""
    folder.mkdir()
    script = folder / "job.sh"
    script.write_text(SCRIPT.format(project=project))
    job = cluster.submit(script, cwd=folder)
    ended = cluster.wait_for_state(job, "COMPLETED FAILED", timeout=LONGEST_SEC)
    if ended["JobState"] != "COMPLETED":
        said = (folder / "job.out").read_text()
        raise SystemExit(f"the script's job is {ended['JobState']}:\n{said[-3000:]}")


def job_times(cluster: Cluster, job: str) -> tuple[float, float]:
    """Start and end of a job that has ended, as Slurm tells them, to the second."""
    facts = cluster.job(job)
    start, end = (
        datetime.fromisoformat(facts[key]).timestamp() for key in ("StartTime", "EndTime")
    )
    return start, end


if __name__ == "__main__":
    main()
