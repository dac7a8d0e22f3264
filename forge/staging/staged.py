"""The stage record (stage.json): where the ranks of each node read the shards, and their removal."""

from __future__ import annotations

import sys
from typing import ClassVar

from pydantic import Field

from forge.cluster import slurm
from forge.cluster.nodes import NodeFailure, NodePool
from forge.cluster.placement import Placement
from forge.core.paths import RunPaths
from forge.core.process import hostname
from forge.core.records import Record
from forge.core.terminal import say
from forge.staging import on_node

REMOVE_SEC = 60.0


class StageRecord(Record):
    """stage.json: what `forge stage` did in this allocation."""

    FIX: ClassVar[str] = "run forge stage again"

    digest: str
    """Of the shards."""
    bytes: int
    """Of the shards."""
    folders: dict[str, str]
    """The directory that the ranks of each node read: a copy on its disk, or the shared one."""
    sent: list[str]
    """Nodes that got a copy now. The others already had one, or read in place."""
    job: str | None
    """The Slurm job that the copies are removed with."""
    roots: dict[str, str]
    """The private directory of the job's copies, by node; {} where nothing is to be removed."""
    python: str | None = None
    """The Python on the nodes that runs Forge there, with `stage.project`."""
    phase_sec: dict[str, float] = Field(default_factory=dict)
    """Seconds of archiving, sending and verifying."""


def staged_folders(paths: RunPaths) -> dict[str, str]:
    """The directory of the shards by node; {} where the run was not staged."""
    record = StageRecord.read_if_there(paths.stage)
    return record.folders if record else {}


def staged_python(paths: RunPaths) -> str:
    """The Python for the ranks: the one that `stage.project` copied to the nodes, else this one."""
    record = StageRecord.read_if_there(paths.stage)
    return record.python or sys.executable if record else sys.executable


def remove_staged(paths: RunPaths, placement: Placement) -> None:
    """Remove the shards that `stage` copied to the nodes of this job for this run, unless they are kept
    (`stage.keep`) or another run of the job reads them.

    A failure is printed, not raised: the next `stage` on that node removes what is left.
    """
    record = StageRecord.read_if_there(paths.stage)
    job = placement.job.id if placement.job else slurm.this_job_id()
    if record is None or record.job is None or record.job != job or not record.roots:
        return
    whose = {"job": record.job, "run": paths.root.name}
    wanted = {host: {"root": root, **whose} for host, root in record.roots.items()}
    if set(wanted) == {hostname()}:
        on_node.unmark(**wanted[hostname()])
        return
    nodes = Placement(tuple(wanted), placement.job)
    with NodePool(nodes, python=staged_python(paths), start_sec=10) as pool:
        answers = pool.ask("unmark", timeout_sec=REMOVE_SEC, each=wanted)
    for host, reply in answers.items():
        if isinstance(reply, NodeFailure):
            say(f"stage: could not remove the shards from {host}: {reply.message}")
