"""Goodput under preemption: the same events hit each contender, which keeps one program training.

python -m bench.storm [--contender NAME ...] [--seeds 3] [--minutes 20]
brings up the test cluster, so needs root and Slurm. Each (contender, seed) is one raw file in --results;
a rerun makes only those that are missing.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from bench.storm import raw, table, trace
from bench.storm.contender import QUICK, Contender, Layout
from bench.storm.contenders.forge import ForgeProgram, ForgeTrainer
from bench.storm.contenders.naive import Naive, NaiveRequeue, Undisturbed
from bench.storm.contenders.nvrx import Nvrx
from bench.storm.contenders.published import Foreground, Trap
from bench.storm.contenders.snakemake import Rule
from bench.storm.contenders.submitit import Submitit
from bench.storm.contenders.torchft import Torchft
from bench.storm.contenders.trainer import JitTrainer
from bench.storm.strike import Storm
from forge.core.errors import DataError, ForgeError
from tools.slurm_cluster.cluster import REPOSITORY, base_folder, why_not
from tools.slurm_cluster.machines import ClusterError
from tools.slurm_cluster.settings import MAX_NODES, Settings, default_partitions
from tools.slurm_cluster.temporary import temporary_cluster

OF_FORGE = (ForgeProgram, ForgeTrainer)
OF_OTHERS = (Nvrx, Torchft, Submitit, Rule, Foreground, Trap, JitTrainer)
CONTENDERS: dict[str, type[Contender]] = {
    kind.name: kind for kind in (Undisturbed, Naive, NaiveRequeue, *OF_FORGE, *OF_OTHERS)
}

QUICK_RESULTS = REPOSITORY / "build/storm-quick"


def main() -> None:
    options = parser().parse_args()
    try:
        run(options)
    except (ForgeError, ClusterError) as err:
        sys.exit(str(err))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m bench.storm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--contender",
        action="append",
        choices=CONTENDERS,
        metavar="NAME",
        help="once or more: " + " · ".join(f"{k}: {c.what}" for k, c in CONTENDERS.items()),
    )
    seeds = made.add_mutually_exclusive_group()
    seeds.add_argument("--seeds", type=_count, default=3, help="storms of each contender (3)")
    seeds.add_argument(
        "--seed",
        type=_count,
        action="append",
        metavar="N",
        help="storms of this seed; once or more",
    )
    made.add_argument("--minutes", type=_positive, default=20.0, help="length of a storm (20)")
    made.add_argument("--mean-sec", type=_positive, default=120.0, help="between events (120)")
    made.add_argument(
        "--shape", type=_positive, default=1.0, help="of Weibull: 1 Poisson, 0.6 bursts"
    )
    made.add_argument("--print-trace", action="store_true", help="of seed 1, as JSON, and end")
    others = made.add_mutually_exclusive_group()
    others.add_argument("--trace", type=Path, metavar="FILE", help="these events, not drawn ones")
    others.add_argument(
        "--from-sacct", type=Path, metavar="FILE", help="events of a site's history"
    )
    made.add_argument(
        "--results", type=Path, help="folder of raw files (bench/storm/results; build/storm-quick)"
    )
    size = made.add_mutually_exclusive_group()
    size.add_argument(
        "--nodes", type=_nodes, default=Layout.nodes, help=f"with a rank each ({Layout.nodes})"
    )
    size.add_argument(
        "--quick", action="store_true", help="two nodes and small checkpoints, to see that it runs"
    )
    return made


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of storms; 1 or more")
    return int(text)


def _nodes(text: str) -> int:
    most = MAX_NODES - Layout.spare_nodes
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of nodes; 1 to {most}")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def run(options: argparse.Namespace) -> None:
    """Make the raw files that are missing."""
    if options.print_trace:
        print(trace_of(options, 1).model_dump_json(indent=1))
        return
    if reason := why_not():
        print(f"skipped: {reason}")
        return
    layout = QUICK if options.quick else Layout(nodes=options.nodes)
    results = options.results or (QUICK_RESULTS if options.quick else raw.FOLDER)
    if results.exists() and not results.is_dir():
        raise DataError(f"--results {results} is a file", fix="name a folder, which may be new")
    names = list(dict.fromkeys(options.contender or CONTENDERS))
    print(f"assumed shares of events: {trace.shares_text()}", flush=True)
    for seed in options.seed or range(1, options.seeds + 1):
        for name in rotated(names, seed):
            if reason := CONTENDERS[name].why_not():
                print(f"{name} does not run here: {reason}", flush=True)
                continue
            events = trace_of(options, seed)
            if not CONTENDERS[name].is_struck:
                if seed > 1:  # all seeds are the same without events
                    continue
                events = trace.Trace(source="no events", events=())
            path = raw.file_of(results, name, seed)
            if path.exists():
                refuse_other(path, events, options.minutes, layout.nodes)
                print(f"{path} is there already", flush=True)
                continue
            print(f"\n{name}, {events.source}: {len(events.events)} events", flush=True)
            one_storm(CONTENDERS[name], layout, events, options.minutes, seed).write(path)
    print(f"\n{table.tables(raw.read_all(results))}", end="")


def rotated(names: list[str], seed: int) -> list[str]:
    """The contenders in another order for each seed: none is always the first on a machine that idled."""
    first = (seed - 1) % len(names)
    return names[first:] + names[:first]


def refuse_other(path: Path, events: trace.Trace, minutes: float, nodes: int) -> None:
    """Raises DataError for the raw file of another storm than the one that is asked for."""
    found = raw.Raw.read(path)
    if found.trace != events or (found.minutes, found.num_nodes) != (minutes, nodes):
        raise DataError(
            f"{path} is of another storm: {found.minutes:g} minutes, {found.num_nodes} nodes,"
            f" {found.trace.source}; asked for are {minutes:g} minutes, {nodes} nodes, {events.source}",
            fix="ask for that one, or name another folder: --results FOLDER",
        )


def trace_of(options: argparse.Namespace, seed: int) -> trace.Trace:
    """The events of a seed; of a file or of a site's history, which all seeds share. Raises DataError."""
    if options.trace:
        return trace.within(trace.Trace.read(options.trace), options.minutes)
    if options.from_sacct:
        replayed = trace.replayed(options.from_sacct, options.mean_sec)
        return trace.within(replayed, options.minutes)
    return trace.drawn(seed, options.minutes, options.mean_sec, options.shape)


def one_storm(
    kind: type[Contender], layout: Layout, events: trace.Trace, minutes: float, seed: int
) -> raw.Raw:
    """A storm on a cluster of its own: what one contender breaks does not reach the next."""
    settings = Settings(
        nodes=layout.nodes + layout.spare_nodes,
        partitions=default_partitions(grace_sec=layout.grace_sec),
    )
    with temporary_cluster(base_folder(), f"storm-{os.getpid()}", settings) as cluster:
        contender = kind(cluster, cluster.folder / "scratch" / kind.name, layout)
        return Storm(contender, events, minutes, lambda text: print(text, flush=True)).run(seed)


if __name__ == "__main__":
    main()
