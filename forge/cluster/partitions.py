"""Partitions and nodes of the cluster: limits of a request, and state of the nodes."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass

from forge.cluster import slurm

# sinfo's %T (man sinfo, NODE STATE CODES): nodes in these states start no jobs for now.
_UNAVAILABLE = ("down", "drain", "fail", "error", "unk", "maint", "reserved", "inval", "reboot")
_NODE_FORMAT = "%R|%N|%c|%m|%T|%f|%G|%d"
# The questions, for who keeps the answers.
PARTITIONS = ("scontrol", "show", "partition", "--all", "--oneliner")
NODES = ("sinfo", "--all", "--Node", "--noheader", f"--format={_NODE_FORMAT}")
_GPUS = re.compile(r"(?:^|,)gpu(?::([^:,()]+))?:(\d+)(?=[,(]|$)")  # gpu:h100:4(S:0-1)


@dataclass(frozen=True)
class Node:
    """A node in one partition. cpus, memory_mb: within MaxCPUsPerNode and MaxMemPerNode. disk_mb:
    TmpDisk, the size of its TmpFS, 0 where the site has not configured it."""

    name: str
    cpus: int
    memory_mb: int
    state: str
    features: frozenset[str]
    gpus: tuple[tuple[str, int], ...]  # (model, count); model "" where Slurm has none configured
    disk_mb: int = 0

    @property
    def is_available(self) -> bool:
        """Whether a job can start on the node, now or after its jobs. `*` marks an unresponsive node."""
        return not self.state.startswith(_UNAVAILABLE) and not self.state.endswith("*")

    def num_gpus(self, model: str) -> int:
        """Number of GPUs of this model; of all models for ""."""
        return sum(count for name, count in self.gpus if model in ("", name))


@dataclass(frozen=True)
class Partition:
    """A partition as shown by `scontrol show partition`, with its nodes."""

    name: str
    is_default: bool
    state: str  # UP, DOWN (queues jobs), DRAIN and INACTIVE (accept none)
    max_minutes: float  # math.inf: no limit
    min_nodes: int
    max_nodes: float
    accounts: frozenset[str]  # with access; empty: all but `denied_accounts`
    denied_accounts: frozenset[str]
    nodes: tuple[Node, ...] = ()

    def accepts(self, account: str) -> bool:
        """Whether jobs of this account may run here. Slurm keeps account names in lower case."""
        if self.accounts:
            return account.lower() in self.accounts
        return account.lower() not in self.denied_accounts


def read_partitions() -> dict[str, Partition]:
    """The partitions that Slurm shows to this user, by name. Raises what slurm.ask raises."""
    lines = slurm.ask(*PARTITIONS).splitlines()
    return parse_partitions(lines, slurm.ask(*NODES).splitlines())


def parse_partitions(partitions: list[str], nodes: list[str]) -> dict[str, Partition]:
    """Partitions from lines of `scontrol show partition --oneliner`, nodes from lines of sinfo."""
    fields = [dict(re.findall(r"(\S+?)=(\S*)", line)) for line in partitions]
    named = {values["PartitionName"]: values for values in fields if "PartitionName" in values}
    by_partition: dict[str, list[Node]] = defaultdict(list)
    for line in nodes:
        name, *values = line.strip().split("|")
        if name in named and len(values) == _NODE_FORMAT.count("|"):
            by_partition[name].append(_node(values, named[name]))
    return {
        name: Partition(
            name=name,
            is_default=values.get("Default") == "YES",
            state=values.get("State", "UP"),
            max_minutes=_minutes(values.get("MaxTime", "UNLIMITED")),
            min_nodes=int(_number(values.get("MinNodes", "0"))),
            max_nodes=_number(values.get("MaxNodes", "UNLIMITED")),
            accounts=_names(values.get("AllowAccounts", "ALL")),
            denied_accounts=_names(values.get("DenyAccounts", "")),
            nodes=tuple(by_partition[name]),
        )
        for name, values in named.items()
    }


def _node(values: list[str], partition: dict[str, str]) -> Node:
    name, cpus, memory, state, features, gres, disk = values
    return Node(
        name=name,
        cpus=int(min(_number(cpus), _number(partition.get("MaxCPUsPerNode", "UNLIMITED")))),
        memory_mb=int(min(_number(memory), _number(partition.get("MaxMemPerNode", "UNLIMITED")))),
        state=state,
        features=frozenset(_names(features)),
        gpus=tuple((model or "", int(count)) for model, count in _GPUS.findall(gres)),
        disk_mb=int(min(_number(disk), 10**9)),
    )


def _number(text: str) -> float:
    """The number; infinity for a word (UNLIMITED, NONE)."""
    match = re.match(r"\d+", text)  # sinfo writes 8+ where nodes differ
    return int(match.group()) if match else math.inf


def _names(text: str) -> frozenset[str]:
    return frozenset() if text in ("ALL", "(null)", "") else frozenset(text.split(","))


def _minutes(text: str) -> float:
    """Slurm's [DAYS-]HOURS:MINUTES:SECONDS in minutes; infinity for a word."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if not match:
        return math.inf
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return 24 * 60 * days + 60 * hours + minutes + seconds / 60
