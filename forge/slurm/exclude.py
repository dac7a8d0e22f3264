"""The unhealthy nodes of a run (`bad_nodes.txt`), which its next jobs exclude for a day."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from forge.core.files import atomic_open
from forge.core.terminal import say
from forge.slurm import slurm
from forge.slurm.partitions import read_partitions

# By then a node is repaired, or drained by those who look after it. If it is neither, it is found again.
KEEP_SEC = 24 * 3600.0
# Begins a comment with the nodes of `tried_again`.
_AGAIN = "# tried again: "


@dataclass(frozen=True)
class BadNode:
    """A line of the file: `node03   # 2026-11-24T18:49:12 does not start a process`."""

    name: str
    reason: str = ""
    since: datetime | None = (
        None  # local time; None where a person wrote the line: it is kept for good
    )

    @classmethod
    def parse(cls, line: str) -> BadNode:
        name, _, comment = (part.strip() for part in line.partition("#"))
        since, _, reason = comment.partition(" ")
        with suppress(ValueError):
            if "T" not in since:  # a date alone was written by a person
                return cls(name, comment)
            return cls(name, reason, datetime.fromisoformat(since).replace(tzinfo=None))
        return cls(name, comment)

    @property
    def is_over(self) -> bool:
        age = (datetime.now() - self.since).total_seconds() if self.since else 0
        return age > KEEP_SEC

    def __str__(self) -> str:
        comment = " ".join([*([self.since.isoformat()] if self.since else []), self.reason]).strip()
        return f"{self.name}   # {comment}" if comment else self.name


def entries(path: Path) -> list[BadNode]:
    """The nodes that are excluded now, in the order of the file. [] without a file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [node for line in lines if (node := BadNode.parse(line)).name and not node.is_over]


def read(path: Path) -> list[str]:
    """The names of the nodes that are excluded now."""
    return [node.name for node in entries(path)]


def tried_again(path: Path) -> set[str]:
    """Nodes that Forge has excluded and does not any more, after a day or since too few were left. A job
    that is requeued still has them among the nodes that it excludes."""
    lines = path.read_text().splitlines() if path.exists() else []
    dropped = {
        name
        for line in lines
        if line.startswith(_AGAIN)
        for name in line.removeprefix(_AGAIN).split()
    }
    over = {node.name for node in map(BadNode.parse, lines) if node.name and node.is_over}
    return (dropped | over) - set(read(path))


def add(path: Path, reasons: Mapping[str, str], job: slurm.Job) -> None:
    """Exclude nodes, with their reasons, from the run's next jobs. None where the job has ended or was
    requeued, suspended or preempted meanwhile: what then fails on a node says nothing about it.

    So many at most that the partition of this job keeps enough nodes for it: with more, the next one
    would be pending for good. Of those that are too many, the nodes found first are tried again.
    """
    if not reasons:
        return
    if nothing := slurm.no_evidence(job):
        say(f"{', '.join(sorted(reasons))}: not excluded, since {nothing}")
        return
    now = datetime.now().replace(microsecond=0)
    new = [BadNode(name, " ".join(reasons[name].split()), now) for name in sorted(reasons)]
    nodes = [*(node for node in entries(path) if node.name not in reasons), *new]
    again = tried_again(path)
    dropped = _too_many(nodes, job, again)
    kept_nodes = [node for node in nodes if node not in dropped]
    again = (again | {node.name for node in dropped}) - {node.name for node in kept_nodes}
    with atomic_open(path, "w") as file:
        file.writelines(f"{node}\n" for node in kept_nodes)
        if again:
            file.write(f"{_AGAIN}{' '.join(sorted(again))}\n")
    if kept := ", ".join(node.name for node in new if node not in dropped):
        say(f"{kept}: excluded for {KEEP_SEC / 3600:g} hours, see {path}")
    if dropped:
        names = ", ".join(sorted(node.name for node in dropped))
        say(f"{names}: not excluded, since partition {job.partition} would have too few nodes left")


def _too_many(nodes: Sequence[BadNode], job: slurm.Job, again: Set[str]) -> list[BadNode]:
    """Excluded nodes that the partition of the job cannot spare. [] where Slurm does not answer. again:
    those of `tried_again`, which the job may exclude until it is requeued."""
    try:
        partition = read_partitions().get(job.partition)
    except (slurm.SlurmSilent, slurm.Refused):
        return []
    if partition is None:
        return []
    cores = max((count for _, count in job.cpus), default=1)
    of_user = set(job.excluded) - {node.name for node in nodes} - again
    fitting = {
        node.name
        for node in partition.nodes
        if node.cpus >= cores and node.num_gpus("") >= job.gpus_per_node
    } - of_user
    fitting_nodes = [node for node in nodes if node.name in fitting]
    fitting_nodes.sort(key=lambda node: node.since or datetime.max, reverse=True)
    return fitting_nodes[max(0, len(fitting) - len(job.nodes)) :]
