"""The Slurm requests of the jobs of this workflow, as the executor will submit them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from forge.cluster import slurm
from forge.cluster.jobs import TRAIN_RULE


@dataclass(frozen=True)
class Request:
    """The request of one job. Sizes are per node; times in minutes, memory in MB."""

    rules: tuple[str, ...]  # more than one for the allocation of a run
    minutes: int
    other_minutes: int = 0  # of an allocation, without `train_run`
    account: str = ""
    partition: str = ""  # "": Slurm's default; may be a list, such as a,b
    nodes: int = 1
    tasks_per_node: int = 1
    cpus_per_task: int = 1
    mem_mb: int = 0
    gres: str = ""
    constraint: str = ""
    qos: str = ""
    extra: str = ""  # further options of sbatch

    @classmethod
    def of(cls, job: Any) -> Request:
        """The request of a job, or group of jobs, of Snakemake."""
        members = list(job.jobs) if job.is_group() else [job]
        asked = job.resources.get
        nodes = _int(asked("nodes")) or 1
        tasks = _int(asked("tasks_per_node")) or -(-_int(asked("tasks")) // nodes) or 1
        cpus = _int(asked("cpus_per_task")) or _int(job.threads) or 1
        others = [m.resources.get("runtime") for m in members if m.rule.name != TRAIN_RULE]
        return cls(
            rules=tuple(sorted(member.rule.name for member in members)),
            minutes=_int(asked("runtime")),
            other_minutes=sum(map(_int, others)) if job.is_group() else 0,
            nodes=nodes,
            tasks_per_node=tasks,
            cpus_per_task=cpus,
            mem_mb=_int(asked("mem_mb")) or _int(asked("mem_mb_per_cpu")) * cpus * tasks,
            **_texts(asked),
        )

    @classmethod
    def of_rule(cls, rule: str, resources: Mapping[str, Any], threads: int) -> Request:
        """The request of a rule of one task, from the resources that the profile gives it."""
        asked = resources.get
        return cls(
            rules=(rule,),
            minutes=_int(asked("runtime")),
            cpus_per_task=_int(asked("cpus_per_task")) or threads,
            mem_mb=_int(asked("mem_mb")),
            **_texts(asked),
        )

    @property
    def name(self) -> str:
        return "the allocation of a run" if self.is_allocation else f"rule {self.rules[0]}"

    @property
    def is_allocation(self) -> bool:
        return len(self.rules) > 1 or self.rules == (TRAIN_RULE,)

    @property
    def profile_keys(self) -> str:
        """The keys of a profile that set its resources."""
        if self.is_allocation:
            return "set-resources of train_run"
        return f"default-resources, or set-resources of {self.rules[0]}"

    @property
    def cpus(self) -> int:
        """Cores on each node."""
        return self.cpus_per_task * self.tasks_per_node

    @property
    def gpus(self) -> tuple[str, int]:
        """Model ("" for any) and number of GPUs on each node."""
        match = re.fullmatch(r"gpu(?::([A-Za-z][\w.-]*))?(?::(\d+))?", self.gres)
        return (match.group(1) or "", int(match.group(2) or 1)) if match else ("", 0)

    @property
    def features(self) -> frozenset[str]:
        """Features that every node must have; none where the constraint is an expression."""
        plain = re.fullmatch(r"[\w.,&-]*", self.constraint)
        return frozenset(filter(None, re.split("[,&]", self.constraint))) if plain else frozenset()

    @property
    def excluded(self) -> frozenset[str]:
        given = [word for word in shlex.split(self.extra) if word.startswith("--exclude=")]
        return frozenset(name for word in given for name in slurm.expand(word.partition("=")[2]))

    @property
    def options(self) -> list[str]:
        """The request as options of sbatch."""
        values = {
            **{"account": self.account, "partition": self.partition, "nodes": self.nodes},
            **{"cpus-per-task": self.cpus_per_task, "mem": self.mem_mb, "time": self.minutes},
            **{"gres": self.gres, "constraint": self.constraint, "qos": self.qos},
        }
        # With GPUs the executor passes no --ntasks; the allocation of a run has --ntasks-per-node.
        tasks = [] if self.gpus[1] else [f"--ntasks={self.nodes * self.tasks_per_node}"]
        given = [f"--{name}={value}" for name, value in values.items() if value]
        return [*given, *tasks, *shlex.split(self.extra)]


def _texts(asked: Callable[[str], Any]) -> dict[str, Any]:
    """Values of the profile that Slurm gets unchanged; "" for each that the profile does not set."""
    keys = {"account": "slurm_account", "partition": "slurm_partition", "extra": "slurm_extra"}
    keys |= {key: key for key in ("gres", "constraint", "qos")}
    return {name: str(asked(key) or "") for name, key in keys.items()}


def _int(value: Any) -> int:
    return value if isinstance(value, int) else 0


def requests_of(jobs: Iterable[Any]) -> list[Request]:
    """The different requests of these jobs of Snakemake to this cluster."""
    other_cluster = ("cluster", "clusters", "slurm_cluster")
    here = (
        job for job in jobs if not job.is_local and not any(map(job.resources.get, other_cluster))
    )
    return list(dict.fromkeys(map(Request.of, here)))
