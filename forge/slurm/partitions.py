"""Partitions and nodes of the cluster: limits of a request, and state of the nodes."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass

from forge.slurm import slurm

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
    TmpDisk, the size of its TmpFS, 0 where the site has not configured it. threads_per_core: only where
    `scontrol show node` was asked; each counts as one of the cpus."""

    name: str
    cpus: int
    memory_mb: int
    state: str
    features: frozenset[str]
    gpus: tuple[tuple[str, int], ...]  # (model, count); model "" where Slurm has none configured
    disk_mb: int = 0
    threads_per_core: int = 1

    @property
    def is_available(self) -> bool:
        """Return whether a job can start on the node, now or after its jobs. `*` marks an unresponsive
        node."""
        return not self.state.startswith(_UNAVAILABLE) and not self.state.endswith("*")

    def num_gpus(self, model: str) -> int:
        """Number of GPUs of this model; of all models for ""."""
        return sum(count for name, count in self.gpus if model in ("", name))


@dataclass(frozen=True)
class Partition:
    """A partition as shown by `scontrol show partition`, with its nodes. Memory in MB."""

    name: str
    is_default: bool
    state: str  # UP, DOWN (queues jobs), DRAIN and INACTIVE (accept none)
    max_minutes: float  # math.inf: no limit
    min_nodes: int
    max_nodes: float
    accounts: frozenset[str]  # with access; empty: all but `denied_accounts`
    denied_accounts: frozenset[str]
    nodes: tuple[Node, ...] = ()
    qos: str = ""  # whose limits hold for its jobs, besides those of their own QOS
    allowed_qos: frozenset[str] = frozenset()  # empty: all but `denied_qos`
    denied_qos: frozenset[str] = frozenset()
    tier: int = 1  # PriorityTier
    preempt_mode: str = ""
    grace_sec: int = 0  # from SIGTERM to SIGKILL where its jobs are preempted
    is_exclusive: bool = False  # a job gets all of its nodes
    is_closed: bool = False  # to all but root, or to jobs without a reservation
    max_memory_per_cpu: float = math.inf
    submitting: frozenset[str] = frozenset()  # nodes from which jobs may be submitted; empty: all

    def accepts(self, account: str) -> bool:
        """Return whether jobs of this account may run here. Slurm keeps account names in lower case."""
        if self.accounts:
            return account.lower() in self.accounts
        return account.lower() not in self.denied_accounts

    def accepts_qos(self, qos: str) -> bool:
        """Return whether jobs of this QOS may run here."""
        return qos in self.allowed_qos if self.allowed_qos else qos not in self.denied_qos


def read_partitions(*, patience_sec: float | None = None) -> dict[str, Partition]:
    """The partitions that Slurm shows to this user, by name. patience_sec, and what is raised: as for
    slurm.ask."""
    lines = slurm.ask(*PARTITIONS, patience_sec=patience_sec).splitlines()
    nodes = slurm.ask(*NODES, patience_sec=patience_sec).splitlines()
    return parse_partitions(lines, nodes)


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
        name: _partition(name, values, tuple(by_partition[name])) for name, values in named.items()
    }


def _partition(name: str, values: dict[str, str], nodes: tuple[Node, ...]) -> Partition:
    return Partition(
        name=name,
        is_default=values.get("Default") == "YES",
        state=values.get("State", "UP"),
        max_minutes=minutes(values.get("MaxTime", "UNLIMITED")),
        min_nodes=_count(values.get("MinNodes", "0")),
        max_nodes=_number(values.get("MaxNodes", "UNLIMITED")),
        accounts=_names(values.get("AllowAccounts", "ALL")),
        denied_accounts=_names(values.get("DenyAccounts", "")),
        nodes=nodes,
        qos=values.get("QoS", "N/A").removeprefix("N/A"),
        allowed_qos=_names(values.get("AllowQos", "ALL")),
        denied_qos=_names(values.get("DenyQos", "")),
        tier=int(min(_number(values.get("PriorityTier", "1")), 65533)),
        preempt_mode=values.get("PreemptMode", ""),
        grace_sec=int(min(_number(values.get("GraceTime", "0")), 10**6)),
        is_exclusive=values.get("OverSubscribe") == "EXCLUSIVE"
        or values.get("Exclusive") == "NODE",
        is_closed="YES" in (values.get("RootOnly"), values.get("ReqResv")),
        max_memory_per_cpu=_number(values.get("MaxMemPerCPU", "UNLIMITED")),
        submitting=frozenset(slurm.expand(_text(values.get("AllocNodes", "ALL")))),
    )


def _node(values: list[str], partition: dict[str, str]) -> Node:
    name, cpus, memory, state, features, gres, disk = values
    return Node(
        name=name,
        cpus=int(min(_count(cpus), _number(partition.get("MaxCPUsPerNode", "UNLIMITED")))),
        memory_mb=int(min(_count(memory), _number(partition.get("MaxMemPerNode", "UNLIMITED")))),
        state=state,
        features=frozenset(_names(features)),
        gpus=tuple((model or "", int(count)) for model, count in _GPUS.findall(gres)),
        disk_mb=_count(disk),
    )


def _number(text: str) -> float:
    """The number; infinity for a word (UNLIMITED, NONE)."""
    match = re.match(r"\d+", text)  # sinfo writes 8+ where nodes differ
    return int(match.group()) if match else math.inf


def _count(text: str) -> int:
    """The number; 0 for a word (N/A of a node that is not there)."""
    number = _number(text)
    return 0 if math.isinf(number) else int(number)


def _text(text: str) -> str:
    return "" if text in ("ALL", "(null)") else text


def _names(text: str) -> frozenset[str]:
    return frozenset(filter(None, _text(text).split(",")))


def minutes(text: str) -> float:
    """Slurm's [DAYS-]HOURS:MINUTES:SECONDS in minutes; infinity for a word, or no text."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if not match:
        return math.inf
    days, hours, mins, seconds = (int(part or 0) for part in match.groups())
    return 24 * 60 * days + 60 * hours + mins + seconds / 60
