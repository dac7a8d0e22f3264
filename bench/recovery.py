"""From an event to the next new step of a run: how long, and spent on what? Seconds.

python -m bench.recovery [--event NAME ...] [--rounds 5] [--ranks-per-node 2] [--quick]
brings up the test cluster, so needs root and Slurm
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence

import pandas as pd

from bench import kernels
from bench.interruptions import EVENTS, NODES, LabRun, Rounds
from bench.recovery_split import PHASES, Split
from tools.slurm_cluster.cluster import Cluster, base_folder, why_not
from tools.slurm_cluster.machines import ClusterError
from tools.slurm_cluster.settings import Settings, default_partitions
from tools.slurm_cluster.temporary import temporary_cluster

ROUNDS = 5
RANKS_PER_NODE = 2
KERNELS = "kernels"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = {name: event.what for name, event in EVENTS.items()}
    what[KERNELS] = "a requeue with torch.compile, kernels kept or lost: no Slurm, not by default"
    parser.add_argument(
        "--event",
        action="append",
        choices=what,
        metavar="NAME",
        help="once or more: " + " · ".join(f"{name}: {text}" for name, text in what.items()),
    )
    parser.add_argument("--rounds", type=_count, default=ROUNDS, help=f"of each event ({ROUNDS})")
    parser.add_argument(
        "--ranks-per-node",
        type=_count,
        metavar="N",
        help=f"on each of {NODES} nodes ({RANKS_PER_NODE}; with --quick 1); they share the cores here",
    )
    parser.add_argument("--quick", action="store_true", help="one round, by default of killed-rank")
    options = parser.parse_args()
    names = options.event or (["killed-rank"] if options.quick else list(EVENTS))
    rounds = 1 if options.quick else options.rounds
    if KERNELS in names:
        kernels.run(is_quick=options.quick)
    if names := [name for name in dict.fromkeys(names) if name != KERNELS]:
        usual = 1 if options.quick else RANKS_PER_NODE
        on_cluster(names, rounds, options.ranks_per_node or usual)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of 1 or more")
    return int(text)


def on_cluster(names: Sequence[str], rounds: int, ranks_per_node: int) -> None:
    """Measure these events, and print the table of each as soon as it is complete."""
    if reason := why_not():
        print(f"skipped: {reason}")
        return
    settings = Settings(nodes=4, partitions=default_partitions(grace_sec=30))
    print(
        f"seconds from the event to the next new step: {NODES} nodes x {ranks_per_node} ranks on"
        f" {os.cpu_count()} cores, medians of {rounds}",
        flush=True,
    )
    with temporary_cluster(base_folder(), f"bench-{os.getpid()}", settings) as cluster:
        for name in names:
            splits = measure(cluster, name, rounds, ranks_per_node)
            print(f"\n{name}: {EVENTS[name].what} (load {os.getloadavg()[0]:.1f})")
            print(table(splits).to_string(float_format="{:,.1f}".format), flush=True)


def measure(cluster: Cluster, name: str, rounds: int, ranks_per_node: int) -> list[Split]:
    """The rounds of one event, in a run of its own."""
    event = EVENTS[name]
    folder = cluster.folder / "scratch" / name
    run = LabRun.start(cluster, folder, event.partition, ranks_per_node)
    try:
        each = Rounds(run, event)
        return [each.next() for _ in range(rounds)]
    except ClusterError as err:
        raise SystemExit(f"{name}: {err}") from None
    finally:
        run.end()


def table(splits: Sequence[Split]) -> pd.DataFrame:
    """Median, least and most seconds of each phase that took any, of all but Slurm's delay and repeated
    steps, and of all."""
    rows = {
        phase: [split.seconds[phase] for split in splits]
        for phase in PHASES
        if any(split.seconds[phase] for split in splits)
    }
    rows["of Forge"] = [split.of_forge for split in splits]
    rows["in all"] = [split.total for split in splits]
    return pd.DataFrame.from_dict(
        {name: [statistics.median(sec), min(sec), max(sec)] for name, sec in rows.items()},
        orient="index",
        columns=["median", "least", "most"],
    )


if __name__ == "__main__":
    main()
