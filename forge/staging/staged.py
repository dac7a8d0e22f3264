"""The stage record (stage.json): where the ranks of each node read the shards, and what is removed."""

from __future__ import annotations

import sys
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from forge.cluster import slurm
from forge.cluster.nodes import Crew, Trouble
from forge.cluster.placement import Place
from forge.core.errors import DataError
from forge.core.files import read_object, write_json
from forge.core.paths import RunPaths
from forge.core.process import hostname
from forge.core.terminal import say
from forge.staging import on_node

REMOVE_SEC = 60.0
FORMAT: Literal[1] = 1


class StageRecord(BaseModel):
    """What `forge stage` did in this allocation."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    format: Literal[1] = FORMAT
    digest: str
    """Of the shards."""
    bytes: int
    """Of the shards."""
    folders: dict[str, str]
    """By node, what its ranks read: a copy on its disk, or the shared folder."""
    sent: list[str]
    """Nodes that got a copy now; the others had one, or read in place."""
    job: str | None
    """The Slurm job that the copies are removed with."""
    roots: dict[str, str]
    """By node, the private folder that holds the job's copies; empty where nothing is to be removed."""
    python: str | None = None
    """What runs Forge on the nodes, where `stage.project` has put it there."""
    parts_sec: dict[str, float] = {}
    """Seconds of packing, sending and checking."""

    @classmethod
    def read(cls, paths: RunPaths) -> Self | None:
        """The record of a run; None where `forge stage` was not called. Raises DataError."""
        if not paths.stage.exists():
            return None
        values = read_object(paths.stage, "format")
        if values["format"] != FORMAT:
            raise DataError(
                f"{paths.stage} has format {values['format']!r}, this version of Forge reads {FORMAT}",
                cause="written by another version of Forge",
                fix="run forge stage again",
            )
        try:
            return cls.model_validate(values)
        except ValidationError as err:
            problem = err.errors()[0]
            key = ".".join(map(str, problem["loc"]))
            raise DataError(
                f"{paths.stage} is no stage record: {key}: {problem['msg']}",
                cause="edited by hand",
                fix="run forge stage again",
            ) from None

    def write(self, paths: RunPaths) -> None:
        """Replace the run's stage.json."""
        write_json(paths.stage, self.model_dump(mode="json"))


def staged_folders(paths: RunPaths) -> dict[str, str]:
    """Where `stage` put the shards, by node; empty where it was not asked."""
    record = StageRecord.read(paths)
    return record.folders if record else {}


def staged_python(paths: RunPaths) -> str:
    """What runs the ranks: the Python that `stage.project` put on the nodes, else this one."""
    record = StageRecord.read(paths)
    return record.python or sys.executable if record else sys.executable


def remove_staged(paths: RunPaths, place: Place) -> None:
    """Remove what `stage` put on the nodes of this job for this run, unless it is to be kept.

    What another run of the same job still reads stays. Trouble is told, never raised: what is left
    goes with the next `stage` on that node.
    """
    record = StageRecord.read(paths)
    job = place.job.id if place.job else slurm.this_job_id()
    if record is None or record.job is None or record.job != job or not record.roots:
        return
    whose = {"job": record.job, "run": paths.root.name}
    wanted = {host: {"root": root, **whose} for host, root in record.roots.items()}
    if set(wanted) == {hostname()}:
        on_node.unmark(**wanted[hostname()])
        return
    nodes = Place(tuple(wanted), place.job)
    with Crew(nodes, python=staged_python(paths), start_sec=10) as crew:
        answers = crew.ask("unmark", timeout_sec=REMOVE_SEC, each=wanted)
    for host, reply in answers.items():
        if isinstance(reply, Trouble):
            say(f"stage: could not remove the shards from {host}: {reply.message}")
