"""The stage record (stage.json): where the ranks of each node read, and the removal of copies."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from forge.cluster import slurm
from forge.cluster.nodes import NodeFailure, NodePool
from forge.cluster.placement import Placement
from forge.core.config import ResolvedConfig
from forge.core.files import digest_file
from forge.core.paths import RunPaths, inputs_folder, stage_proof_file
from forge.core.process import hostname
from forge.core.program_settings import Program
from forge.core.records import Record, StageProof
from forge.core.terminal import say
from forge.data.input_set import InputSet, copy_folders
from forge.launch.rank_records import ProgramFolders
from forge.staging import on_node
from forge.staging.environment import StagedProject

REMOVE_SEC = 60.0


class StageRecord(Record):
    """stage.json: what `forge stage` did in this allocation."""

    FIX: ClassVar[str] = "run forge stage again"

    digest: str
    """Digest of the shards, or of a program's inputs; "" for a program without inputs."""
    bytes: int
    """Size of these files."""
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
    source: str = ""
    """The directory on the nodes in which another training program runs, with `stage.project`."""
    source_digest: str = ""
    """Digest of the files in `source`, when they were copied."""
    phase_sec: dict[str, float] = Field(default_factory=dict)
    """Seconds of archiving, sending and verifying."""

    @classmethod
    def of_no_files(cls, job: str | None, roots: dict[str, str]) -> StageRecord:
        """The record of a program without inputs."""
        return cls(digest="", bytes=0, folders={}, sent=[], job=job, roots=roots)

    def with_project(self, project: StagedProject) -> StageRecord:
        """The record, with what `stage.project` has copied."""
        copied = {name: getattr(project, name) for name in ("python", "source", "source_digest")}
        return self.model_copy(update=copied)

    def keep(self, paths: RunPaths) -> None:
        """Write stage.json of the run, and in the project that this is it. Raises UnfitError."""
        self.write(paths.stage)
        StageProof(record=digest_file(paths.stage)).write(stage_proof_file(paths.root))


def stage_record(paths: RunPaths) -> StageRecord | None:
    """The stage record of this job, which decides what nodes execute and remove; None where `forge stage`
    of this project did not write it in this job: the directory of a run may come from somebody else, or
    have been left by another job. Raises DataError for one of ours that is corrupt.
    """
    if not paths.stage.exists():
        return None
    proof = StageProof.read_if_there(stage_proof_file(paths.root))
    if proof is None or not paths.stage.is_file() or proof.record != digest_file(paths.stage):
        return _unused(paths.stage, f"`forge stage` in {Path.cwd()} did not write it")
    record = StageRecord.read(paths.stage)
    if record.job != (job := slurm.this_job_id()):
        return _unused(paths.stage, f"it is of job {record.job}, this is {job or 'no job'}")
    return record


@cache  # said once
def _unused(path: Path, why: str) -> None:
    say(f"note: {path} is not used: {why}; ranks read the shared directories")


def staged_folders(paths: RunPaths) -> dict[str, str]:
    """The directory of shards or inputs by node; {} where the run was not staged."""
    record = stage_record(paths)
    return record.folders if record else {}


def program_folders(
    config: ResolvedConfig, program: Program
) -> tuple[dict[str, ProgramFolders], ProgramFolders]:
    """What the ranks of a program read: by node where it was staged, and the shared directories, for
    other nodes."""
    record = stage_record(RunPaths.of(config))
    cwd = record.source if record and record.source else str(program.folder)
    if not config.ids.inputs:
        return {}, ProgramFolders(cwd=cwd, data="", hub="")
    inputs = InputSet.open(inputs_folder(config.data, config.ids.inputs))
    shared = ProgramFolders(cwd=cwd, data=inputs.data, hub=inputs.hub)
    folders = record.folders if record and record.digest == inputs.digest else {}
    staged = {
        host: _in_copy(inputs, folder, cwd)
        for host, folder in folders.items()
        if Path(folder) != inputs.folder.resolve()  # else this node reads in place
    }
    return staged, shared


def staged_source_digest(paths: RunPaths) -> str:
    """Digest of the directory in which a program's ranks run; "" where they run in the shared one."""
    record = stage_record(paths)
    return record.source_digest if record else ""


def _in_copy(inputs: InputSet, folder: str, cwd: str) -> ProgramFolders:
    data, hub = copy_folders(folder, inputs.manifest)
    return ProgramFolders(cwd=cwd, data=data, hub=hub)


def staged_python(paths: RunPaths) -> str:
    """The Python for the ranks: that which `stage.project` copied to the nodes, else this process's."""
    record = stage_record(paths)
    return record.python or sys.executable if record else sys.executable


def remove_staged(paths: RunPaths, placement: Placement) -> None:
    """Remove what `stage` copied to the nodes of this job for this run, unless it is kept (`stage.keep`)
    or another run of the job reads it.

    A failure is printed, not raised: the next `stage` on that node removes what is left.
    """
    record = stage_record(paths)
    if record is None or record.job is None or not record.roots:
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
            say(f"stage: could not remove the staged files from {host}: {reply.message}")
