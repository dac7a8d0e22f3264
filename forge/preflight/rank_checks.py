"""Checks of the results of all ranks' probes: do the collectives work, is a node slower than others?"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

from forge.core.machine import Machine
from forge.core.records import Check
from forge.hosts.placement import WorldLayout
from forge.launch.rank_records import ProbedRank, ProbeResult, RankRecord
from forge.preflight.gpu_floors import floors_of

SHOWN_RANKS = 16

Speeds = dict[str, tuple[float, float | None]]  # place -> speed and floor, None where none is known


def rank_checks(record: RankRecord, layout: WorldLayout, machine: Machine) -> Iterator[Check]:
    """Checks of the results of a completed probe of all ranks; `record` is rank 0's."""
    result = record.result
    assert isinstance(result, ProbeResult)
    ranks = result.ranks
    world = layout.world_size
    where = ", ".join(f"{r.rank}={r.host}:{r.device}" for r in ranks[:SHOWN_RANKS])
    more = f" and {world - SHOWN_RANKS} more" if world > SHOWN_RANKS else ""
    mapped = sorted(rank.rank for rank in ranks) == list(range(world))
    yield Check(
        "mapping",
        "ok" if mapped else "fail",
        f"world of {world}: {where}{more}",
        "" if mapped else "set --nodes and --ranks-per-node to what the launcher starts",
    )
    yield Check("rendezvous", "ok", f"{result.backend} over {result.interface or 'any'}")
    differing = [rank.rank for rank in ranks if rank.versions != ranks[0].versions]
    if differing:
        message = f"ranks {differing} have other versions than rank 0"
        yield Check("versions", "fail", message, "use one environment on all nodes")
    else:
        yield Check("versions", "ok", "equal on all ranks")
    right = result.all_reduce_right
    figures = f"{result.latency_us:.0f} µs, bus {result.bus_gb_per_sec:.2f} GB/s"
    yield Check(
        "all-reduce",
        "ok" if right else "fail",
        figures if right else "the sum over ranks is wrong",
        "" if right else "the interface or GPU link corrupts data: leave this node out",
    )
    if result.backend == "nccl":
        yield _network(ranks)
    if ranks[0].gpu:
        yield from _against_floors(result, layout)
    if layout.nodes > 1:
        yield from _slow_nodes(ranks, machine.preflight.slow_factor)


def _network(ranks: list[ProbedRank]) -> Check:
    """Check that NCCL uses InfiniBand on every node that has it."""
    chosen = sorted({rank.network for rank in ranks if rank.network})
    message = f"NCCL uses {', '.join(chosen) or 'a network that its log does not name'}"
    by_socket = [
        rank.host for rank in ranks if rank.infiniband and rank.network.startswith("Socket")
    ]
    if not by_socket:
        return Check("network", "ok", message)
    return Check(
        "network",
        "warn",
        f"{message}: sockets on {', '.join(dict.fromkeys(by_socket))}, which have InfiniBand",
        "unset NCCL_IB_DISABLE, run ibstat on these nodes, and set fabric.debug: true to see why",
        cause="NCCL found no InfiniBand device that it can use; training would be many times slower",
    )


def _against_floors(result: ProbeResult, layout: WorldLayout) -> Iterator[Check]:
    """Compare the speeds of GPUs with those that their kind has. Warnings: a search for the broken node
    would find none, since all of them communicate."""
    products: Speeds = {}
    copies: Speeds = {}
    sums: Speeds = {}
    for rank in result.ranks:
        where, known = f"{rank.host}:{rank.device}", floors_of(rank.gpu)
        products[where] = (rank.tflop_per_sec, known.bf16 and known.bf16 / 1e12)
        if rank.copy_gb_per_sec is not None:
            copies[where] = (rank.copy_gb_per_sec, known.host_copy and known.host_copy / 1e9)
        if layout.nodes == 1 and layout.world_size > 1 and result.backend == "nccl":
            sums[rank.host] = (result.bus_gb_per_sec, known.all_reduce and known.all_reduce / 1e9)
    yield from _floor_check("bf16 product", products, "TFLOP/s", COMPUTES_SLOWLY)
    yield from _floor_check("host copy", copies, "GB/s", "its PCIe link has lost lanes or speed")
    yield from _floor_check("all-reduce rate", sums, "GB/s", "NCCL does not use NVLink there")


def _floor_check(name: str, speeds: Speeds, unit: str, cause: str) -> Iterator[Check]:
    low = [
        f"{where} {speed:.3g} (a good one has more than {floor:.3g})"
        for where, (speed, floor) in speeds.items()
        if floor and speed < floor
    ]
    if low:
        fix = "leave these nodes out (slurm.exclude), or continue"
        yield Check(name, "warn", f"slow: {', '.join(low)} {unit}", fix, cause)
    elif speeds:
        median = statistics.median(speed for speed, _ in speeds.values())
        known = all(floor for _, floor in speeds.values())
        than = "none below its floor" if known else "no floor is known for this GPU"
        yield Check(name, "ok", f"median {median:.3g} {unit}, {than}")


def _slow_nodes(ranks: list[ProbedRank], factor: float) -> Iterator[Check]:
    """Compare each node's matrix product (median of its ranks) and bandwidth with the median of nodes."""
    hosts = {rank.rank: rank.host for rank in ranks}
    products: dict[str, list[float]] = {host: [] for host in hosts.values()}
    pairs: dict[str, list[float]] = {host: [] for host in hosts.values()}
    for rank in ranks:
        products[rank.host].append(rank.tflop_per_sec)
        pairs[rank.host] += [speed for _, speed in rank.pairs]
    product = {host: statistics.median(values) for host, values in products.items()}
    yield _compared("matrix product", product, factor, "TFLOP/s a rank", COMPUTES_SLOWLY)
    # median_high: with one slow node of three, each of the others has one slow pair and one fast one.
    pair = {host: statistics.median_high(values) for host, values in pairs.items() if values}
    yield _compared("pair bandwidth", pair, factor, "GB/s to others", TALKS_SLOWLY)


COMPUTES_SLOWLY = "another program runs there, or the processor or GPU is throttled"
TALKS_SLOWLY = "its link runs at a lower speed, or loses packets"


def _compared(
    name: str, speeds: Mapping[str, float], factor: float, unit: str, cause: str
) -> Check:
    middle = statistics.median(speeds.values())
    if len(speeds) < 3:
        return Check(name, "ok", f"median {middle:.3g} {unit}; it takes three nodes to compare")
    slow = {host: speed for host, speed in speeds.items() if speed * factor < middle}
    if not slow:
        return Check(name, "ok", f"median {middle:.3g} {unit}, no node below 1/{factor:g} of it")
    hosts = ", ".join(f"{host} {speed:.3g}" for host, speed in sorted(slow.items()))
    message = f"slow: {hosts}; median of {len(speeds)} nodes {middle:.3g} {unit}"
    return Check(name, "warn", message, f"exclude {', '.join(sorted(slow))}, or continue", cause)
