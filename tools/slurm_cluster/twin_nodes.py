"""The nodes of a twin: which nodes of the site are alike, and how many stand for each kind."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from forge.core.errors import DataError
from forge.slurm.partitions import Node, parse_partitions
from forge.slurm.site import SiteAnswers

from .cluster import fields
from .settings import MAX_NODES, NodeKind, Settings
from .twin_keys import FEATURE, checked

NODES_PER_KIND = 4
MAX_GPUS = 64  # of a node: a device file each
MAX_CPUS = 65533  # Slurm's own limit
MAX_MB = 10**9

Values = Mapping[str, str]


@dataclass(frozen=True)
class Group:
    """Nodes of the site that are alike, also in their partitions."""

    kind: NodeKind
    partitions: frozenset[str]
    names: tuple[str, ...]


def groups_of(site: SiteAnswers, partitions: Sequence[str]) -> list[Group]:
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
    groups = [Group(kind, where, tuple(names)) for (kind, where), names in alike.items()]
    return sorted(groups, key=lambda group: -len(group.names))


def _size(node: Node) -> tuple[object, ...]:
    return node.cpus, node.memory_mb, node.gpus


def _details(site: SiteAnswers, nodes: Mapping[str, Node]) -> dict[tuple[object, ...], Values]:
    """Values of `scontrol show node` for a node of each size."""
    shown = (fields(line) for line in site.answer("examples").lines)
    return {_size(nodes[one["NodeName"]]): one for one in shown if one.get("NodeName", "") in nodes}


def _kind(node: Node, details: Values) -> NodeKind:
    def number(key: str, default: int = 0) -> int:
        text = details.get(key, "")
        return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else default

    if not (0 < node.cpus <= MAX_CPUS and 0 < node.memory_mb <= MAX_MB):
        raise DataError(
            f"node {node.name[:80]!r} has {node.cpus} CPUs and {node.memory_mb} MB",
            fix=SiteAnswers.FIX,
        )
    if sum(count for _, count in node.gpus) > MAX_GPUS:
        raise DataError(
            f"node {node.name[:80]!r} has more than {MAX_GPUS} GPUs", fix=SiteAnswers.FIX
        )
    sockets, threads = max(1, number("Sockets")), max(1, number("ThreadsPerCore"))
    # A site may count cores as CPUs where each has two threads.
    if sockets * number("CoresPerSocket") * threads != node.cpus:
        threads = 1
        sockets = sockets if node.cpus % sockets == 0 else 1
    most = {"CoreSpecCount": node.cpus // threads, "MemSpecLimit": node.memory_mb}
    return NodeKind(
        cpus=node.cpus,
        sockets=sockets,
        threads_per_core=threads,
        memory_mb=node.memory_mb,
        disk_mb=node.disk_mb,
        gpus=tuple((checked("GPU type", model) if model else "", n) for model, n in node.gpus if n),
        features=tuple(checked("feature", one, FEATURE) for one in sorted(node.features)),
        reserved=tuple((key, number(key)) for key in most if 0 < number(key) < most[key]),
    )


def numbers_of(groups: Sequence[Group]) -> dict[Group, int]:
    """Number of nodes that stand for each group: two in each partition, so that a job of two nodes can
    start there, then one of each kind, then more of those that have fewest. At most NODES_PER_KIND of a
    kind and MAX_NODES in all: of more kinds than that, those with the fewest nodes are left out."""
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


def twins_of(numbers: Mapping[Group, int]) -> dict[str, Group]:
    """The group that each node of the twin stands for, by its name."""
    groups = [group for group, number in numbers.items() for _ in range(number)]
    if not groups:
        raise DataError("no partition that the user may use has a node", fix=SiteAnswers.FIX)
    return dict(zip(Settings(nodes=len(groups)).node_names, groups, strict=True))


def notes_on_nodes(groups: Sequence[Group], twins: Mapping[str, Group]) -> Iterator[str]:
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
