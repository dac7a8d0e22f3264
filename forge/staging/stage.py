"""`forge stage`: copy token shards, or a program's inputs, to the nodes' local disks, and verify them.

Its record says what the ranks of each node read, and what is removed at the end.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from forge.core import events
from forge.core.config import ResolvedConfig
from forge.core.files import digest_file
from forge.core.machine import Machine
from forge.core.paths import RunPaths, inputs_folder, stage_proof_file, tokens_folder
from forge.core.process import hostname, node_local_folder, slurm_start
from forge.core.program_settings import Program
from forge.core.records import StageProof, StageRecord
from forge.core.terminal import say
from forge.data.inputs import InputSet, copy_folders
from forge.data.shards import FileSet
from forge.data.sources import open_tokens
from forge.hosts.nodes import NodeFailure, NodePool, NodesFailed, at_fault
from forge.hosts.placement import (
    Placement,
    WorldLayout,
    check_source,
    fewest_nodes,
    find_placement,
)
from forge.launch.rank_records import ProgramFolders
from forge.slurm import exclude, slurm
from forge.staging import on_node
from forge.staging.to_nodes import stage_nodes


def stage(config: ResolvedConfig, machine: Machine, layout: WorldLayout) -> Path:
    """Make the run's shards, or the inputs of its program, readable from fast storage on every node; the
    path of stage.json.

    A node that has a valid copy keeps it. stage.json has the directory that the ranks of each node read.
    A node whose own disk fails, or that does not respond, is excluded from the run's next jobs. Raises
    UnfitError for a full disk, a directory that another user could tamper with, and nodes that do
    not respond; DataError for corrupt shards, and for inputs that have changed; ConfigError as
    `check_source`.
    """
    started = time.time()
    paths = RunPaths.of(config)
    check_source(machine, layout, config)
    placement = find_placement(machine, layout, config.folders)
    source = _files(config)
    try:
        record = stage_nodes(
            source, config, machine, placement, min_nodes=_fewest_nodes(machine, layout)
        )
    except NodesFailed as err:
        if job := placement.job or slurm.this_job():
            folder = Path(machine.stage.folder or node_local_folder())
            exclude.add(paths.bad_nodes, at_fault(err.failures, placement, folder), job)
        raise
    seconds = round(time.time() - started, 3)
    said = record.model_dump(include={"bytes", "digest", "folders", "sent"})
    events.record(paths.events, events.Stage(seconds=seconds, **said))
    keep(record, paths)
    return paths.stage


def _fewest_nodes(machine: Machine, layout: WorldLayout) -> int:
    """Number of nodes that must be left. With slurm.shrink more than half, as in preflight."""
    if not machine.slurm.shrink:
        return layout.nodes
    return max(fewest_nodes(machine, layout), layout.nodes // 2 + 1)


def _files(config: ResolvedConfig) -> FileSet | None:
    """The files that the run reads; None for a program without inputs."""
    if config.ids.tokens:
        return open_tokens(tokens_folder(config.data, config.ids.tokens))
    if not config.ids.inputs:
        return None
    inputs = InputSet.open(inputs_folder(config.data, config.ids.inputs))
    inputs.check_unchanged()
    return inputs


# --- the stage record -----------------------------------------------------------------------------


REMOVE_SEC = 60.0


def keep(record: StageRecord, paths: RunPaths) -> None:
    """Write stage.json of the run, and in the project that this is it. Raises UnfitError and
    SlurmSilent."""
    record.write(paths.stage)
    proof = StageProof(
        record=digest_file(paths.stage), cluster=slurm.this_cluster(), restart=slurm_start()[1]
    )
    proof.write(stage_proof_file(paths.root))


def stage_record(paths: RunPaths) -> StageRecord:
    """The stage record of this start of this job, which decides what nodes execute and remove; an empty
    one where `forge stage` of this project did not write it in this start: the directory of a run may
    come from somebody else, or have been left by another job, or by the start before a requeue.
    Raises DataError for one of ours that is corrupt, and SlurmSilent.

    A command reads it once, with the run's lock held, and hands it down.
    """
    if not paths.stage.exists():
        return StageRecord()
    proof = StageProof.read_if_there(stage_proof_file(paths.root))
    if proof is None or not paths.stage.is_file() or proof.record != digest_file(paths.stage):
        return _unused(paths.stage, f"`forge stage` in {Path.cwd()} did not write it")
    record = StageRecord.read(paths.stage)
    if record.job != (job := slurm.this_job_id()):
        return _unused(paths.stage, f"it is of job {record.job}, this is {job or 'no job'}")
    if proof.cluster != (cluster := slurm.this_cluster()):
        return _unused(paths.stage, f"it is of cluster {proof.cluster}, this is {cluster}")
    restart = slurm_start()[1]
    if None not in (proof.restart, restart) and proof.restart != restart:
        why = f"it is of start {proof.restart} of job {job}, this is start {restart}"
        return _unused(paths.stage, why)
    return record


def _unused(path: Path, why: str) -> StageRecord:
    say(f"note: {path} is not used: {why}; ranks read the shared directories")
    return StageRecord()


def program_folders(
    config: ResolvedConfig, program: Program, staged: StageRecord
) -> tuple[dict[str, ProgramFolders], ProgramFolders]:
    """Directories that the ranks of a program read: by node where it was staged, and the shared
    directories, for other nodes."""
    cwd = staged.source or str(program.folder)
    if not config.ids.inputs:
        return {}, ProgramFolders(cwd=cwd, data="", hub="")
    inputs = InputSet.open(inputs_folder(config.data, config.ids.inputs))
    shared = ProgramFolders(cwd=cwd, data=inputs.data, hub=inputs.hub)
    folders = staged.folders if staged.digest == inputs.digest else {}
    copies = {
        host: _in_copy(inputs, folder, cwd)
        for host, folder in folders.items()
        if Path(folder) != inputs.folder.resolve()  # else this node reads in place
    }
    return copies, shared


def _in_copy(inputs: InputSet, folder: str, cwd: str) -> ProgramFolders:
    data, hub = copy_folders(folder, inputs.manifest)
    return ProgramFolders(cwd=cwd, data=data, hub=hub)


def remove_staged(staged: StageRecord, run: str, placement: Placement) -> None:
    """Remove what `stage` copied to the nodes of this job for this run, unless it is kept (`stage.keep`)
    or another run of the job reads it.

    A failure is printed, not raised: the next `stage` on that node removes what is left.
    """
    if staged.job is None:
        return
    wanted = {
        host: {"root": root, "job": staged.job, "run": run} for host, root in staged.roots.items()
    }
    if not wanted:
        return
    if set(wanted) == {hostname()}:
        on_node.unmark(**wanted[hostname()])
        return
    nodes = replace(placement, hosts=tuple(wanted))
    try:
        with NodePool(nodes, python=staged.interpreter, start_sec=10) as pool:
            answers = pool.ask(on_node.unmark, timeout_sec=REMOVE_SEC, each=wanted)
    except slurm.SlurmSilent as err:
        say(f"stage: could not remove the staged files: {err.what}")
        return
    for host, reply in answers.items():
        if isinstance(reply, NodeFailure):
            say(f"stage: could not remove the staged files from {host}: {reply.message}")
