"""Partitions and nodes of the cluster: what Slurm lets a job request, and which nodes are up."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass

from forge.cluster import slurm

# sinfo's %T (man sinfo, NODE STATE CODES): on nodes in these states no job starts for now.
_UNAVAILABLE = ("down", "drain", "fail", "error", "unk", "maint", "reserved", "inval", "reboot")
_NODE_FORMAT = "%R|%N|%c|%m|%T|%f|%G"
_GPUS = re.compile(r"(?:^|,)gpu(?::([^:,()]+))?:(\d+)(?=[,(]|$)")  # gpu:h100:4(S:0-1)


@dataclass(frozen=True)
class Node:
    """A node as one partition offers it. memory_mb: RealMemory, capped by MaxMemPerNode."""

    name: str
    cpus: int
    memory_mb: int
    state: str
    features: frozenset[str]
    gpus: tuple[tuple[str, int], ...]  # (model, count); model "" where Slurm is told none

    @property
    def is_available(self) -> bool:
        """Whether a job could start on it now or when its jobs have ended. `*`: does not respond."""
        return not self.state.startswith(_UNAVAILABLE) and not self.state.endswith("*")

    def num_gpus(self, model: str) -> int:
        """GPUs of this model; of all models for ""."""
        return sum(count for name, count in self.gpus if model in ("", name))


@dataclass(frozen=True)
class Partition:
    """A partition as `scontrol show partition` tells it, with its nodes."""

    name: str
    is_default: bool
    state: str  # UP, DOWN (queues jobs), DRAIN and INACTIVE (accept none)
    max_minutes: float  # math.inf where there is no limit
    min_nodes: int
    max_nodes: float
    accounts: frozenset[str]  # that may use it; empty: all but `denied_accounts`
    denied_accounts: frozenset[str]
    nodes: tuple[Node, ...] = ()

    def accepts(self, account: str) -> bool:
        """Whether jobs of this account may run here. Slurm keeps account names in lower case."""
        if self.accounts:
            return account.lower() in self.accounts
        return account.lower() not in self.denied_accounts


def read_partitions() -> dict[str, Partition]:
    """Every partition by name; without those that Slurm does not show to this user.

    Two commands. Raises SlurmSilent, when as slurm.ask says, and Refused.
    """
    lines = slurm.ask("scontrol", "show", "partition", "--all", "--oneliner").splitlines()
    sinfo = ("sinfo", "--all", "--Node", "--noheader", f"--format={_NODE_FORMAT}")
    nodes = slurm.ask(*sinfo).splitlines()
    return parse_partitions(lines, nodes)


def parse_partitions(partitions: list[str], nodes: list[str]) -> dict[str, Partition]:
    """Partitions from lines of `scontrol show partition --oneliner` and of sinfo."""
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
    name, cpus, memory, state, features, gres = values
    return Node(
        name=name,
        cpus=int(min(_number(cpus), _number(partition.get("MaxCPUsPerNode", "UNLIMITED")))),
        memory_mb=int(min(_number(memory), _number(partition.get("MaxMemPerNode", "UNLIMITED")))),
        state=state,
        features=frozenset(_names(features)),
        gpus=tuple((model or "", int(count)) for model, count in _GPUS.findall(gres)),
    )


def _number(text: str) -> float:
    """The number; words (UNLIMITED, NONE) are no limit."""
    found = re.match(r"\d+", text)  # sinfo writes 8+ for nodes that differ
    return int(found.group()) if found else math.inf


def _names(text: str) -> frozenset[str]:
    return frozenset() if text in ("ALL", "(null)", "") else frozenset(text.split(","))


def _minutes(text: str) -> float:
    """Slurm's [DAYS-]HOURS:MINUTES:SECONDS as minutes; any word is no limit."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if not found:
        return math.inf
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return 24 * 60 * days + 60 * hours + minutes + seconds / 60
