"""What does the workflow cost beside a hand-written sbatch script that does the same? Seconds.

python -m bench.pipeline [--quick]    about 6 min; brings up the test cluster, so needs root and Slurm
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from tests.slurm.job_run import write_science
from tests.slurm.project import Project
from tools.slurm_cluster.cluster import base_folder, why_not
from tools.slurm_cluster.settings import Settings
from tools.slurm_cluster.temporary import temporary_cluster

ROUNDS = 3
STEPS = 800  # of training: 40 s on two cores
# What a person would write: one job, the same verbs one after the other, two ranks on two nodes.
SCRIPT = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --mem=1800 --time=10 --output=/dev/null
set -e
run="{config} --data={folder}/data --results={folder}/results --run=base"
ranks="--machine={machine} --nodes=2 --ranks-per-node=1"
forge tokenizer $run
forge tokenize $run --workers=2
forge stage $run $ranks
forge preflight $run $ranks
forge train $run $ranks
forge validate {folder}/results/base/config.json
forge report {folder}/results/base/config.json
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round instead of three")
    options = parser.parse_args()
    if reason := why_not():
        print(f"skipped: {reason}")
        return
    with temporary_cluster(base_folder(), f"bench-{os.getpid()}", Settings(nodes=4)) as cluster:
        config = write_science(cluster.folder / "science", max_steps=STEPS)
        rounds = 1 if options.quick else ROUNDS
        rows = [measure(cluster, config, number) for number in range(rounds)]
    print(pd.DataFrame(rows).round(1).to_string(index=False))
    for name, text in (("snakemake", "all"), ("in jobs", "only what ran inside of jobs")):
        ratio = statistics.median(row[name] / row["script"] for row in rows)
        print(f"workflow / script, {text}: {ratio:.2f} (median of {rounds})")


def measure(cluster: Any, config: Path, number: int) -> dict[str, float]:
    """One round: the workflow, then the script, from nothing to the report."""
    folder = cluster.folder / "scratch" / f"round{number}"
    values = yaml.safe_load(config.read_text()) | {"data": "data"}
    project = Project.make(
        folder / "project",
        cluster,
        values=values,
        names=cluster.nodes,
        train_run={"nodes": 2, "tasks_per_node": 1},
    )
    started = time.time()
    code = project.end(project.start(), timeout=300)
    seconds = time.time() - started
    assert code == 0, project.said()
    jobs = [job_times(cluster, job) for job in project.submitted()]
    running = sum(end - start for start, end in jobs)
    script = folder / "job.sh"
    machine = project.profile_folder / "machine.yaml"
    script.write_text(SCRIPT.format(config=config, folder=folder / "by-hand", machine=machine))
    started = time.time()
    job = cluster.submit(script)
    ended = cluster.wait_for_state(job, "COMPLETED FAILED", timeout=300)
    by_hand = time.time() - started
    assert ended["JobState"] == "COMPLETED", ended
    return {
        "snakemake": seconds,
        "in jobs": running,
        "queue, polling, login node": seconds - running,
        "script": by_hand,
    }


def job_times(cluster: Any, job: str) -> tuple[float, float]:
    """Start and end of a job that has ended, as Slurm tells them, to the second."""
    facts = cluster.job(job)
    start, end = (
        datetime.fromisoformat(facts[key]).timestamp() for key in ("StartTime", "EndTime")
    )
    return start, end


if __name__ == "__main__":
    main()
