"""`forge train`: prepare a run, launch its ranks, restart or requeue them, and write its record."""

from __future__ import annotations

import math
import time
from pathlib import Path

from forge.checkpoint import compatibility, directory, parent, resume
from forge.cluster import exclude, nodes, slurm
from forge.cluster.lock import lock
from forge.cluster.placement import Placement, WorldLayout, check_layout, find_placement
from forge.core import events
from forge.core.config import ResolvedConfig
from forge.core.errors import DataError, Exit, ForgeError, TrainingError, UnfitError
from forge.core.files import read_json, write_json
from forge.core.machine import Machine
from forge.core.paths import RunPaths, tokens_folder
from forge.core.provenance import config_digest
from forge.core.records import PreflightPass, Trained
from forge.core.terminal import say
from forge.launch.launcher import (
    MAX_RESTARTS_AFTER_LOSS,
    RankFailure,
    run_ranks,
    wait_for_orphans,
)
from forge.launch.rank_records import RankRecord, TrainTask
from forge.run import crash_loop, requeue
from forge.staging.staged import remove_staged, staged_folders, staged_python


class StoppedEarly(ForgeError):
    """Training stopped before train.max_steps, with a committed checkpoint."""

    code = Exit.STOPPED


def train(
    config: ResolvedConfig,
    machine: Machine,
    layout: WorldLayout,
    *,
    require_checkpoint: bool = False,
) -> Path:
    """Train a run up to train.max_steps, from its newest valid checkpoint; the path of trained.json.

    Under Slurm the ranks run on the nodes that preflight chose, and a stop by the cluster requeues the
    job. Raises StoppedEarly (75) after a stop; DataError when require_checkpoint is set and there is no
    checkpoint; the errors of config, data and machine.
    """
    own_deadline = time.time() + 60 * machine.max_minutes if machine.max_minutes else math.inf
    paths = RunPaths.of(config)
    check_layout(machine, layout, config)
    placement = find_placement(machine, layout)
    job = placement.job or slurm.this_job()  # ranks that need no srun may run inside a job, too
    deadline = min(own_deadline, job.end_time if job and job.end_time else math.inf)
    with lock(paths.root, "train"):
        wait_for_orphans(paths)
        checkpoint = resume.repaired_latest(paths)
        if checkpoint is None:
            parent.find(config)
            resume.begin_afresh(paths, require_checkpoint, config.parent)
        else:
            compatibility.check_compatible(config, checkpoint)
        refuse_known_failure(config, paths)
        if not paths.config.exists() or read_json(paths.config) != config.training_json():
            write_json(paths.config, config.training_json())
        directory.clean(paths)
        if checkpoint is not None and checkpoint.step == config.train.max_steps:
            digest = _recorded_digest(paths, checkpoint.step)
            if digest:
                say(f"{paths.root} is complete at step {checkpoint.step}: nothing to train")
                remove_staged(paths, placement)
                return _write_trained(config, paths, checkpoint.step, digest)
        staged, shared = _shards(config, paths)
        task = TrainTask(
            step=0,
            started=time.time(),
            staged=staged,
            shared=shared,
            require_checkpoint=require_checkpoint,
            deadline=deadline if deadline < math.inf else None,
            own_deadline=own_deadline if own_deadline < math.inf else None,
        )
        try:
            record = _train_until_it_ends(config, paths, machine, layout, placement, task=task)
        finally:
            remove_staged(paths, placement)
        if record.status in ("stopped", "lost") and job:
            _requeue(record, paths, job, machine, first_step=parent.first_step(config))
        return _conclude(config, paths, record)


def refuse_stop_file(paths: RunPaths) -> None:
    """Raises StoppedEarly while there is a STOP file. The target `resume` removes it."""
    if paths.stop.exists():
        raise StoppedEarly(
            f"{paths.stop} asks this run to stop",
            fix=f"rm {paths.stop}, or use the target `resume`, which removes it",
        )


def refuse_known_failure(config: ResolvedConfig, paths: RunPaths) -> None:
    """TrainingError with the recorded message when this config has diverged before.

    config: as in the run's config.json. Other failures may have been repaired, and are tried again.
    """
    ends = (events.Failed, events.Stop, events.Completed)
    last = events.last(events.read(paths.events), *ends)
    if (
        isinstance(last, events.Failed)
        and last.diverged
        and last.config_digest == config_digest(config)
    ):
        raise TrainingError(
            f"this config failed before: {last.message}",
            fix="change the config under a new run name; parent: RUN@STEP starts it from a checkpoint"
            f" of this one (to try the same once more, remove {paths.events})",
        )


def _shards(config: ResolvedConfig, paths: RunPaths) -> tuple[dict[str, str], str]:
    """Directories from which ranks read: the staged ones by host, and the shared one for other hosts.
    DataError without shards."""
    staged = staged_folders(paths)
    folder = tokens_folder(config.data, config.ids.tokens)
    if not staged and not (folder / "manifest.json").exists():
        raise DataError(
            f"{folder} has no complete shards",
            cause="the corpus has not been tokenized for this config",
            fix=f"run: forge tokenizer {paths.config} && forge tokenize {paths.config}",
        )
    return staged, str(folder)


def _train_until_it_ends(
    config: ResolvedConfig,
    paths: RunPaths,
    machine: Machine,
    layout: WorldLayout,
    placement: Placement,
    *,
    task: TrainTask,
) -> RankRecord:
    """Launch the ranks; after the loss of one, launch again without unresponsive nodes, twice at most."""
    refuse_stop_file(paths)
    passed = PreflightPass.read_if_there(paths.preflight_pass)
    healthy = placement.only(passed.nodes if passed and passed.nodes else placement.hosts)
    hosts = requeue.pick_hosts(healthy, layout.nodes)
    if hosts is None:
        raise UnfitError(
            f"preflight passed {', '.join(healthy.hosts) or 'none'} of {', '.join(placement.hosts)},"
            f" training needs {layout.nodes}",
            fix="run forge preflight in this allocation first",
        )
    for attempt in range(1 + MAX_RESTARTS_AFTER_LOSS):
        checkpoint = resume.repaired_latest(paths)
        if attempt == 0:
            for line in compatibility.schedule_warnings(config, checkpoint):
                say(line)
        step = checkpoint.step if checkpoint else parent.first_step(config)
        _end_if_stuck(config, paths, machine, step)
        record = run_ranks(
            task.model_copy(update={"started": time.time(), "step": step}),
            paths,
            machine,
            layout,
            placement=hosts,
            python=staged_python(paths),
        )
        if record.status != "lost":
            break
        silent = nodes.unresponsive(hosts)
        exclude.add(paths.bad_nodes, dict.fromkeys(silent, "does not start a process"))
        lost = events.Lost(message=record.message, attempt=attempt, silent=silent)
        events.record(paths.events, lost)
        healthy = placement.only([host for host in healthy.hosts if host not in silent])
        hosts = requeue.pick_hosts(healthy, layout.nodes)
        if hosts is None or requeue.was_cancelled(placement):
            break
        if attempt < MAX_RESTARTS_AFTER_LOSS:
            say(f"lost a rank ({record.message}); restarting from the last checkpoint")
    return record


def _end_if_stuck(config: ResolvedConfig, paths: RunPaths, machine: Machine, step: int) -> None:
    """Crash-loop detection: records and raises the TrainingError, instead of another launch."""
    try:
        crash_loop.refuse_if_stuck(paths.events, step, machine.max_restarts_without_progress)
    except TrainingError as err:
        _record_failure(config, paths, RankRecord("failed", code=err.code, message=str(err)))
        raise


def _requeue(
    record: RankRecord,
    paths: RunPaths,
    job: slurm.Job,
    machine: Machine,
    *,
    first_step: int = 0,
) -> None:
    """Requeue the job, which ends this process, or print why it is not requeued.

    Raises StoppedEarly when a requeued job lost ranks: no failure is recorded, so that crash-loop
    detection counts this launch.
    """
    step = _committed_step(paths, first_step)
    goes_back, reason = requeue.requeue(record, paths, job, machine, step=step)
    if reason:
        say(f"not requeued: {reason}")
    if goes_back and record.status == "lost":
        raise StoppedEarly(f"{record.message}; job {job.id} resumes from step {step}")


def _conclude(config: ResolvedConfig, paths: RunPaths, record: RankRecord) -> Path:
    """Write trained.json for a completed run, else raise the error that the record stands for."""
    if record.status == "completed":
        assert record.step is not None
        return _write_trained(config, paths, record.step, str(record.weights_digest))
    if record.status == "stopped":
        first_step = parent.first_step(config)
        step = _committed_step(paths, first_step)
        events.record(paths.events, events.Stop(cause=record.cause, step=step))
        raise StoppedEarly(
            f"{config.run} stopped at step {step} of {config.train.max_steps} ({record.cause});"
            f" {_what_is_kept(record, step, first_step)}",
            fix="rerun the same command to resume",
        )
    _record_failure(config, paths, record)
    if record.status == "lost":
        raise UnfitError(
            f"ranks were lost, and restarts did not help: {record.message}",
            cause="the system killed them (out of memory?), or a node or the network fails",
            fix=f"read the ranks' logs in {paths.logs}, then rerun the same command",
        )
    raise RankFailure(record, paths.logs)


def _what_is_kept(record: RankRecord, step: int, first_step: int = 0) -> str:
    if record.lost:
        ranks = ", ".join(map(str, record.lost))
        return (
            f"rank {ranks} ended without a final checkpoint (before its first step, or killed after"
            f" stop_grace_sec): the steps after {step} are lost"
        )
    return "a checkpoint is committed" if step > first_step else "nothing had been trained yet"


def _record_failure(config: ResolvedConfig, paths: RunPaths, record: RankRecord) -> None:
    failed = events.Failed(
        code=record.code,
        rank=record.rank,
        message=record.message,
        diverged=record.cause == TrainingError.__name__,
        config_digest=config_digest(config),
    )
    events.record(paths.events, failed)


def _committed_step(paths: RunPaths, first_step: int) -> int:
    """The step at which the next launch begins. first_step: that of a run without a checkpoint."""
    committed = resume.latest(paths)
    return committed.step if committed else first_step


def _recorded_digest(paths: RunPaths, step: int) -> str | None:
    """The weights digest of the completed run at this step, from the event log."""
    for event in reversed(events.read(paths.events)):
        if isinstance(event, events.Completed) and event.step == step:
            return event.weights_digest
    return None


def _write_trained(config: ResolvedConfig, paths: RunPaths, step: int, digest: str) -> Path:
    checkpoint = resume.required(paths)
    assert checkpoint.step == step
    made_from = checkpoint.manifest.lineage.parent
    Trained(
        run=config.run,
        goal_step=config.train.max_steps,
        step=step,
        checkpoint=f"checkpoints/{checkpoint.folder.name}",
        weights_digest=digest,
        config_digest=config_digest(config),
        parent=made_from.to_json() if made_from else None,
    ).write(paths.trained)
    return paths.trained
