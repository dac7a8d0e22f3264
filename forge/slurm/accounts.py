"""Accounts and QOS of a user in Slurm's accounting, and their limits."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from forge.slurm.partitions import Partition, minutes

_UNITS = {"": 1, "K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2, "P": 1024**3}


@dataclass(frozen=True)
class Limits:
    """Limits of one rule of Slurm. name: of the rule, for people. max_minutes: of a job. of_job,
    of_node, of_all: trackable resources (`node`, `cpu`, `mem` in MB, `gres/gpu`, `gres/gpu:h100`) of a
    job, of a node of a job, and of all jobs of the user together."""

    name: str
    max_minutes: float = math.inf
    of_job: Mapping[str, float] = field(default_factory=dict)
    of_node: Mapping[str, float] = field(default_factory=dict)
    of_all: Mapping[str, float] = field(default_factory=dict)
    least: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Qos:
    """A QOS (sacctmgr show qos). preempts: other QOS whose jobs its jobs preempt."""

    name: str
    limits: Limits
    flags: frozenset[str] = frozenset()
    preempts: frozenset[str] = frozenset()
    preempt_mode: str = ""
    grace_sec: float = 0


@dataclass(frozen=True)
class Association:
    """A user's account (sacctmgr show assoc). partition: in which alone it holds, "" for all. is_default:
    Slurm takes it where a job names none."""

    account: str
    limits: Limits
    partition: str = ""
    qos: tuple[str, ...] = ()
    default_qos: str = ""
    is_default: bool = False

    @property
    def usual_qos(self) -> str:
        """The QOS of a job that names none: the default, else the only one, else normal; "" where Slurm
        shows none of these."""
        if self.default_qos or len(self.qos) == 1:
            return self.default_qos or self.qos[0]
        return "normal" if "normal" in self.qos else ""

    def qos_in(self, partition: Partition) -> list[str]:
        """The QOS that its jobs may have there, the usual one first; [""] where Slurm shows none."""
        names = dict.fromkeys(filter(None, [self.usual_qos, *self.qos]))
        return [name for name in names or [""] if not name or partition.accepts_qos(name)]

    def opens(self, partition: Partition) -> bool:
        """Return whether jobs of this account may run in the partition."""
        is_meant = self.partition in ("", partition.name)
        return is_meant and partition.accepts(self.account) and bool(self.qos_in(partition))


def read_qos(rows: list[dict[str, str]]) -> dict[str, Qos]:
    """QOS by name, from the rows of sacctmgr."""
    return {row["name"]: _qos(row) for row in rows if row.get("name")}


def _qos(row: Mapping[str, str]) -> Qos:
    name = row["name"]
    together = [
        tres(row.get(key, "")) for key in ("grptres", "maxtresperuser", "maxtresperaccount")
    ]
    return Qos(
        name=name,
        limits=Limits(
            name=f"QOS {name}",
            max_minutes=minutes(row.get("maxwall", "")),
            of_job=tres(row.get("maxtres", "")),
            of_node=tres(row.get("maxtrespernode", "")),
            of_all=_least(*together),
            least=tres(row.get("mintres", "")),
        ),
        flags=frozenset(filter(None, row.get("flags", "").split(","))),
        preempts=frozenset(filter(None, row.get("preempt", "").split(","))),
        preempt_mode=row.get("preemptmode", "").upper(),
        grace_sec=60 * _finite(minutes(row.get("gracetime", ""))),
    )


def read_associations(
    rows: list[dict[str, str]], users: list[dict[str, str]], cluster: str
) -> list[Association]:
    """The user's associations with this cluster, the default account first.

    rows, users: of sacctmgr, for associations and for the user's default account.
    """
    default = next((row.get("defaultaccount", "") for row in users), "")
    here = [row for row in rows if row.get("account") and _is_of(row, cluster)]
    found = [
        Association(
            account=row["account"],
            limits=Limits(
                name=f"account {row['account']}",
                max_minutes=minutes(row.get("maxwall", "")),
                of_job=tres(row.get("maxtres", "")),
                of_node=tres(row.get("maxtrespernode", "")),
                of_all=tres(row.get("grptres", "")),
            ),
            partition=row.get("partition", ""),
            qos=tuple(filter(None, row.get("qos", "").split(","))),
            default_qos=row.get("defaultqos", ""),
            is_default=row["account"] == default,
        )
        for row in here
    ]
    return sorted(found, key=lambda association: not association.is_default)


def _is_of(row: Mapping[str, str], cluster: str) -> bool:
    return not cluster or row.get("cluster", "").lower() in ("", cluster.lower())


def tres(text: str) -> dict[str, float]:
    """`cpu=64,mem=1T,gres/gpu=16` as numbers, memory in MB."""
    found = re.findall(r"([\w/:.-]+)=(\d+(?:\.\d+)?)([KMGTP]?)", text)
    return {
        name.lower(): float(number) * (_UNITS[unit] if name.lower() == "mem" else 1)
        for name, number, unit in found
    }


def _least(*limits: Mapping[str, float]) -> dict[str, float]:
    names = {name for each in limits for name in each}
    return {name: min(each.get(name, math.inf) for each in limits) for name in sorted(names)}


def _finite(value: float) -> float:
    return 0 if math.isinf(value) else value
