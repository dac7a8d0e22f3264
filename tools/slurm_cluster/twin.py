"""The twin of a site: a test cluster with the nodes, partitions, limits and accounts of a real one.

The file has Slurm's answers on that cluster, as `forge profile --save FILE` writes them. The site's are:
names, limits, accounts, QOS and preemption of partitions; CPUs, memory, GPUs and features of nodes; the
user's associations and all QOS (root has them in the twin, as its jobs are root's); and of slurm.conf
the keys in OF_CLUSTER and WORDS of twin_keys.py, with Slurm's default where the file has none. The test
cluster's own, as in SLURM_CONF of settings.py, are: names and number of nodes, the cluster's name,
daemons, plugins that need cgroups, and what makes it fast (AuthInfo=cred_expire, SchedulerParameters,
timeouts of daemons).
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from forge.cluster.partitions import Node, parse_partitions
from forge.cluster.site import SiteAnswers
from forge.core.errors import DataError

from .cluster import fields
from .machines import ClusterError
from .settings import MAX_NODES, NodeKind, PartitionSettings, Settings, slurm_conf
from .twin_accounts import commands, of_user, qos_names
from .twin_keys import (
    FEATURE,
    UNSET,
    LeftOut,
    checked,
    keys_of_cluster,
    keys_of_partition,
    names_in,
    own_keys,
)

MAX_PARTITIONS = 200
NODES_PER_KIND = 4
MAX_GPUS = 64  # of a node: a device file each
MAX_CPUS = 65533  # Slurm's own limit
MAX_MB = 10**9

Values = Mapping[str, str]


@dataclass(frozen=True)
class _Group:
    """Nodes of the site that are alike, also in their partitions."""

    kind: NodeKind
    partitions: frozenset[str]
    names: tuple[str, ...]


def twin_of(site: SiteAnswers) -> tuple[Settings, list[str]]:
    """Settings of the twin, and notes for people: what stands for what, what was scaled or left out.

    Raises DataError for a name that slurm.conf could take for something else, or a size out of bounds.
    """
    left_out = LeftOut()
    values, notes = _open_partitions(site)
    groups = _groups(site, list(values))
    numbers = _numbers(groups)
    twins = _twins(numbers)
    named = {
        qos
        for partition in values.values()
        for key in ("QoS", "AllowQos", "DenyQos")
        for qos in names_in("QOS", partition.get(key, ""))
    }
    qos = qos_names(site, named, left_out)
    gpu_types = sorted({model for group in numbers for model, _ in group.kind.gpus if model})
    keys = keys_of_cluster(site.settings, left_out) | _tracked(numbers, gpu_types)
    partitions = tuple(
        PartitionSettings(
            name,
            keys_of_partition(name, partition, left_out, qos=qos, gpu_types=gpu_types),
            tuple(twin for twin, group in twins.items() if name in group.partitions),
        )
        for name, partition in values.items()
    )
    accounting = tuple(commands(site, qos, set(values), gpu_types, left_out))
    settings = Settings(
        nodes=len(twins),
        kinds=tuple(group.kind for group in twins.values()),
        partitions=partitions,
        qos=tuple(name for name in qos if name != "normal"),
        accounting=accounting if of_user(site) else Settings().accounting,
        keys=keys,
    )
    return settings, [
        *_notes_on_nodes(groups, twins),
        *notes,
        *_notes_on_partitions(settings),
        *_notes_on_accounts(site),
        *left_out.notes(),
        *own_keys(site.settings, slurm_conf(settings, Path("/"))),
    ]


def fit_for_here(settings: Settings) -> tuple[Settings, list[str]]:
    """The settings without keys that the Slurm of this machine does not know, and a note on each of
    these. ClusterError when it refuses slurm.conf for another reason."""
    notes: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        conf = Path(folder) / "slurm.conf"
        while True:
            conf.write_text(slurm_conf(settings, Path(folder)))
            # It reads slurm.conf, names keys that it does not know, and asks no daemon.
            asked = subprocess.run(
                ["sinfo", "--version"],
                env={**os.environ, "SLURM_CONF": str(conf)},
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
            )
            if not asked.returncode:
                return settings, notes
            unknown = set(re.findall(r"unrecognized key: (\w+)", asked.stderr))
            fitting = settings.without(unknown)
            if fitting == settings:
                raise ClusterError(f"Slurm refuses the twin's slurm.conf: {asked.stderr.strip()}")
            settings = fitting
            notes += [
                f"left out: {key}, which the Slurm here does not know" for key in sorted(unknown)
            ]


# ---------------------------------------------------------------------- partitions


def _open_partitions(site: SiteAnswers) -> tuple[dict[str, Values], list[str]]:
    """Fields of the partitions that the user may use, by name, and a note on the others."""
    visible = set(site.answer("visible").lines)
    shown = [fields(line) for line in site.answer("partitions").lines]
    found = {checked("partition", one.get("PartitionName", "")): one for one in shown}
    if not 1 <= len(found) <= MAX_PARTITIONS:
        raise DataError(
            f"the file has {len(found)} partitions; a twin has 1 to {MAX_PARTITIONS}",
            fix=SiteAnswers.FIX,
        )
    closed = {
        name: key
        for name, one in found.items()
        for key, is_closed in {
            "AllowGroups": one.get("AllowGroups", "ALL") not in UNSET and name not in visible,
            "RootOnly": one.get("RootOnly") == "YES",
            "ReqResv": one.get("ReqResv") == "YES",
        }.items()
        if is_closed
    }
    notes = [
        f"left out: partition {name}, closed to the user ({key})" for name, key in closed.items()
    ]
    return {name: one for name, one in found.items() if name not in closed}, notes


def _notes_on_partitions(settings: Settings) -> Iterator[str]:
    for partition in settings.partitions:
        nodes, least = len(partition.nodes or ()), int(partition.keys.get("MinNodes", 0))
        if not nodes:
            yield f"partition {partition.name} has no nodes here"
        elif nodes < least:
            yield (
                f"partition {partition.name} has {nodes} nodes here, and a job must ask for"
                f" {least} (MinNodes): none can start"
            )


# ---------------------------------------------------------------------- nodes


def _groups(site: SiteAnswers, partitions: Sequence[str]) -> list[_Group]:
    """The nodes of these partitions by kind, the largest group first."""
    # Without the partitions' own limits: these are what the twin's Slurm must know of each node.
    bare = [f"PartitionName={name}" for name in partitions]
    members: dict[str, set[str]] = defaultdict(set)
    nodes: dict[str, Node] = {}
    try:
        known = parse_partitions(bare, site.answer("nodes").lines)
    except (OverflowError, ValueError) as err:  # no number, or one of thousands of digits
        raise DataError(
            f"the nodes of the file cannot be read: {err}", fix=SiteAnswers.FIX
        ) from None
    for name, partition in known.items():
        for node in partition.nodes:
            members[node.name].add(name)
            nodes[node.name] = node
    details = _details(site, nodes)
    alike: dict[tuple[NodeKind, frozenset[str]], list[str]] = defaultdict(list)
    for name, node in nodes.items():
        alike[_kind(node, details.get(_size(node), {})), frozenset(members[name])].append(name)
    groups = [_Group(kind, where, tuple(names)) for (kind, where), names in alike.items()]
    return sorted(groups, key=lambda group: -len(group.names))


def _size(node: Node) -> tuple[object, ...]:
    return node.cpus, node.memory_mb, node.gpus


def _details(site: SiteAnswers, nodes: Mapping[str, Node]) -> dict[tuple[object, ...], Values]:
    """What `scontrol show node` says of a node of each size."""
    shown = (fields(line) for line in site.answer("examples").lines)
    return {_size(nodes[one["NodeName"]]): one for one in shown if one.get("NodeName", "") in nodes}


def _kind(node: Node, details: Values) -> NodeKind:
    def number(key: str, default: int) -> int:
        return int(text) if (text := details.get(key, "")).isdecimal() else default

    if not (0 < node.cpus <= MAX_CPUS and 0 < node.memory_mb <= MAX_MB):
        raise DataError(
            f"node {node.name[:80]!r} has {node.cpus} CPUs and {node.memory_mb} MB",
            fix=SiteAnswers.FIX,
        )
    if sum(count for _, count in node.gpus) > MAX_GPUS:
        raise DataError(
            f"node {node.name[:80]!r} has more than {MAX_GPUS} GPUs", fix=SiteAnswers.FIX
        )
    sockets, threads = number("Sockets", 1), number("ThreadsPerCore", 1)
    # A site may count cores as CPUs where each has two threads.
    if sockets * number("CoresPerSocket", 0) * threads != node.cpus:
        threads = 1
        sockets = sockets if node.cpus % max(sockets, 1) == 0 else 1
    kept = {key: number(key, 0) for key in ("CoreSpecCount", "MemSpecLimit")}
    return NodeKind(
        cpus=node.cpus,
        sockets=sockets,
        threads_per_core=threads,
        memory_mb=node.memory_mb,
        disk_mb=node.disk_mb,
        gpus=tuple((checked("GPU type", model) if model else "", n) for model, n in node.gpus if n),
        features=tuple(checked("feature", one, FEATURE) for one in sorted(node.features)),
        reserved=tuple((key, value) for key, value in kept.items() if value),
    )


def _numbers(groups: Sequence[_Group]) -> dict[_Group, int]:
    """How many nodes stand for each group: two in each partition, so that a job of two nodes can start
    there, then one of each kind, then more of those that have fewest. At most NODES_PER_KIND of a kind
    and MAX_NODES in all: of more kinds than that, those with the fewest nodes are left out."""
    uncovered = {name for group in groups for name in group.partitions}
    first = []
    while uncovered:
        group = max(groups, key=lambda group: len(group.partitions & uncovered))
        uncovered -= group.partitions
        first.append(group)
    seconds = [group for group in first if len(group.names) > 1]
    others = [group for group in groups if group not in first]
    numbers = Counter([*first, *seconds, *others][:MAX_NODES])
    while numbers.total() < MAX_NODES:
        most = {group: min(len(group.names), NODES_PER_KIND) for group in numbers}
        larger = [group for group in groups if numbers[group] < most.get(group, 0)]
        if not larger:
            break
        numbers[min(larger, key=lambda group: numbers[group])] += 1
    return {group: numbers[group] for group in groups if group in numbers}


def _twins(numbers: Mapping[_Group, int]) -> dict[str, _Group]:
    """The group that each node of the twin stands for, by its name."""
    groups = [group for group, number in numbers.items() for _ in range(number)]
    if not groups:
        raise DataError("no partition that the user may use has a node", fix=SiteAnswers.FIX)
    return dict(zip(Settings(nodes=len(groups)).node_names, groups, strict=True))


def _notes_on_nodes(groups: Sequence[_Group], twins: Mapping[str, _Group]) -> Iterator[str]:
    for group in groups:
        own = [twin for twin, stands_for in twins.items() if stands_for == group]
        one = checked("node", group.names[0])
        what = one if len(group.names) == 1 else f"{len(group.names)} nodes such as {one}"
        its = f"{_words(group.kind)}; in {', '.join(sorted(group.partitions))}"
        yield f"{', '.join(own) or 'left out'}: the site's {what}: {its}"


def _words(kind: NodeKind) -> str:
    gpus = [f"{count} x {model or 'GPU'}" for model, count in kind.gpus]
    features = f" ({', '.join(kind.features)})" if kind.features else ""
    return ", ".join([*gpus, f"{kind.cpus} CPUs", f"{kind.memory_mb} MB"]) + features


# ---------------------------------------------------------------------- accounting


def _tracked(numbers: Mapping[_Group, int], gpu_types: Sequence[str]) -> dict[str, str | None]:
    """What Slurm counts for limits: GPUs, and each type of them."""
    if not any(group.kind.gpus for group in numbers):
        return {"GresTypes": None, "AccountingStorageTRES": None}
    return {"AccountingStorageTRES": ",".join(["gres/gpu", *(f"gres/gpu:{t}" for t in gpu_types)])}


def _notes_on_accounts(site: SiteAnswers) -> Iterator[str]:
    if of_user(site):
        yield "jobs are root's, with the accounts that the user has at the site"
    else:
        yield "the file has no account of the user: here it is root, or lab"
