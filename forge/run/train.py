"""`forge train`: prepare a run, launch its ranks, restart or requeue them, and write its record."""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from forge.core import events, hooks, project_plugins
from forge.core.config import ResolvedConfig
from forge.core.errors import DiskFull, Exit, ForgeError, TrainingError, UnfitError
from forge.core.machine import Machine
from forge.core.paths import RunPaths, kernels_folder
from forge.core.process import hostname
from forge.core.provenance import config_digest
from forge.core.records import PreflightPass, RunSettings
from forge.core.terminal import say
from forge.hosts import nodes
from forge.hosts.lock import lock
from forge.hosts.placement import (
    Placement,
    WorldLayout,
    check_layout,
    find_placement,
    shrunk_layout,
)
from forge.launch import lost_ranks
from forge.launch.launcher import (
    MAX_RESTARTS_AFTER_LOSS,
    LaunchPlan,
    RankFailure,
    wait_for_orphans,
)
from forge.launch.rank_records import NO_RECORD, RankRecord
from forge.preflight.preflight import recheck
from forge.run import crash_loop, requeue
from forge.run.programs import TrainingProgram, program_of
from forge.slurm import exclude, slurm
from forge.staging.stage import remove_staged, stage_record

# Before each start after the disk was full.
DISK_WAIT_SEC = (30.0, 120.0)


class StoppedEarly(ForgeError):
    """Training stopped before train.max_steps, with a committed checkpoint."""

    code = Exit.STOPPED


def train(
    config: ResolvedConfig,
    machine: Machine,
    layout: WorldLayout,
    settings: RunSettings,
    *,
    require_checkpoint: bool = False,
) -> Path:
    """Train a run up to train.max_steps, from its newest valid checkpoint; the path of trained.json.

    Under Slurm the ranks run on the nodes that preflight chose, and a stop by the cluster requeues the
    job. Raises StoppedEarly (75) after a stop; DataError when require_checkpoint is set and there is no
    checkpoint; the errors of config, data and machine.
    """
    own_deadline = time.time() + 60 * machine.max_minutes if machine.max_minutes else None
    paths = RunPaths.of(config)
    check_layout(machine, layout, config)
    placement = find_placement(machine, layout, config.folders)
    job = placement.job or slurm.this_job()  # ranks that need no srun may run inside a job, too
    ends = [end for end in (own_deadline, job and job.end_time) if end]
    with lock(paths.root, "train"):
        wait_for_orphans(paths)
        staged = stage_record(paths)
        start = LaunchPlan(
            machine, layout, staged, require_checkpoint, min(ends, default=None), own_deadline, job
        )
        program = program_of(config, layout)
        step = program.prepare(start)
        refuse_known_failure(config, paths)
        if not config.is_in(paths.config):
            config.write(paths.config)
        if step is not None and program.is_complete(step):
            say(f"{paths.root} is complete at step {step}: nothing to train")
            remove_staged(staged, paths.root.name, placement)
            return _write_trained(program, step)
        if used := project_plugins.used():
            events.record(paths.events, events.Plugins(used=used))
        with hooks.while_training(paths, settings, config.data):
            try:
                record = _train_until_it_ends(program, start, placement, step)
            finally:
                remove_staged(staged, paths.root.name, placement)
            if record.status not in ("completed", "failed") and job:
                _requeue(record, paths, job, machine, step=_committed_step(program))
            return _conclude(program, record, start)


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
    last = events.last(events.read(paths.events), events.End)
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


def _train_until_it_ends(
    program: TrainingProgram, start: LaunchPlan, placement: Placement, step: int | None
) -> RankRecord:
    """Launch the ranks; after the loss of one, launch again without unhealthy nodes, and in a Slurm job
    after a pause for a full disk: twice at most on one number of nodes. With slurm.shrink there may be
    fewer of them each time.

    step: of the checkpoint that the first launch resumes from; None for a fresh start.
    """
    refuse_stop_file(program.paths)
    healthy, layout = _healthy_nodes(program, start, placement)
    hosts = requeue.pick_hosts(healthy, layout.nodes)
    for line in program.warnings():
        say(line)
    losses, launches, attempt = _Losses(), 0, 0
    while True:
        if launches:
            checkpoint = program.checkpoints.repaired_latest()
            step = checkpoint.step if checkpoint else None
            if step is not None and program.is_complete(step):
                return RankRecord("completed", step=step)
        launches += 1
        try:
            record = _launch(program.on(layout), replace(start, layout=layout), hosts, step)
        except slurm.SlurmSilent as err:  # no rank was lost, and no node is to blame
            return RankRecord("lost", code=err.code, cause=lost_ranks.NOT_STARTED, message=err.what)
        if _waits_for_disk(record, start.job, attempt):
            attempt += 1
            continue
        if record.status != "lost":
            return record
        record, given_up = _record_loss(
            program, start, hosts, record, losses=losses, attempt=attempt
        )
        healthy = healthy.without(given_up)
        fewer = shrunk_layout(start.machine, layout, program.config, len(healthy.hosts))
        # On fewer nodes the count begins again: it ends when they are too few.
        attempt = attempt + 1 if fewer == layout else 0
        if fewer is None or attempt > MAX_RESTARTS_AFTER_LOSS or requeue.was_cancelled(placement):
            return record
        where = _on_fewer_nodes(fewer, start.layout) if fewer != layout else ""
        say(f"lost a rank ({record.what}); restarting from the last checkpoint{where}")
        layout, hosts = fewer, requeue.pick_hosts(healthy, fewer.nodes, avoid=losses.hung)


def _healthy_nodes(
    program: TrainingProgram, start: LaunchPlan, placement: Placement
) -> tuple[Placement, WorldLayout]:
    """The nodes that passed preflight, and the layout that they are enough for. Raises UnfitError where
    they are too few."""
    passed = _preflight_pass(program.paths, placement)
    healthy = placement.only(passed.nodes if passed and passed.nodes else placement.hosts)
    layout = shrunk_layout(start.machine, start.layout, program.config, len(healthy.hosts))
    if layout is None:
        raise UnfitError(
            f"preflight passed {', '.join(healthy.hosts) or 'none'} of {', '.join(placement.hosts)},"
            f" training needs {start.layout.nodes}",
            fix="run forge preflight in this allocation first",
        )
    return healthy, layout


def _preflight_pass(paths: RunPaths, placement: Placement) -> PreflightPass | None:
    """Nodes that preflight passed in this allocation; None without preflight. That of another one, which
    is of other nodes or of another day, is named and not used."""
    passed = PreflightPass.read_if_there(paths.preflight_pass)
    if passed is None:
        return None
    if job := placement.job:
        here = (slurm.this_cluster(), job.id, job.restarts)
        is_of_here = (passed.cluster, passed.job, passed.restart) == here
    else:
        is_of_here = passed.job is None and passed.host in placement.hosts
    if is_of_here:
        return passed
    where = f"job {passed.job}, start {passed.restart}" if passed.job else passed.host
    say(f"note: {paths.preflight_pass} is not used: it is of {where}; no node was checked")
    return None


@dataclass
class _Losses:
    """Nodes of an allocation on which ranks were lost, in all its launches."""

    # Of ranks that hung, or that this one does not reach: spare ones take their place, even where they
    # are healthy.
    hung: list[str] = field(default_factory=list)
    linked: list[str] = field(default_factory=list)  # not reached, and they reach Slurm


def _record_loss(
    program: TrainingProgram,
    start: LaunchPlan,
    hosts: Placement,
    record: RankRecord,
    *,
    losses: _Losses,
    attempt: int,
) -> tuple[RankRecord, list[str]]:
    """Find and record what is to blame for the loss of a rank: the record with that node, and the nodes
    that must not train again in this allocation. hosts: of the ranks."""
    paths = program.paths
    silent = nodes.unresponsive(hosts) if record.silent is None else list(record.silent)
    # No node starts a process for a job that is over, and its ranks are killed.
    if hosts.job and slurm.is_over(hosts.job):
        events.record(paths.events, events.Lost(message=record.what, attempt=attempt, silent=[]))
        return record, []
    record, gone = lost_ranks.on_nodes(record, silent, hostname(), losses.linked)
    lost = events.Lost(message=record.what, attempt=attempt, silent=silent)
    events.record(paths.events, lost)
    unhealthy = dict.fromkeys(gone, "does not start a process")
    unhealthy |= _at_fault(record, program.config, start, hosts.without(silent))
    if hosts.job:
        exclude.add(paths.bad_nodes, unhealthy, hosts.job)
    if record.cause == lost_ranks.HANG:
        losses.hung.append(record.host)
    losses.hung += silent
    losses.linked += [host for host in silent if host not in gone]
    # Ranks cannot be started on a silent node, whoever is to blame: without a spare, only a smaller
    # number of nodes does without it.
    unused = silent if start.machine.slurm.shrink else []
    return record, [*unhealthy, *unused]


def _on_fewer_nodes(layout: WorldLayout, whole: WorldLayout) -> str:
    return (
        f" on {layout.nodes} of {whole.nodes} nodes, {layout.world_size} of {whole.world_size} ranks"
        " (slurm.shrink); a requeue asks for all nodes again"
    )


def _waits_for_disk(record: RankRecord, job: slurm.Job | None, attempt: int) -> bool:
    """Wait if the ranks ended because of a full disk; return whether they start again in the allocation.
    Others often free a shared disk within a minute, and the next allocation may come after days."""
    if record.cause != DiskFull.__name__ or job is None or attempt == len(DISK_WAIT_SEC):
        return False
    seconds = DISK_WAIT_SEC[attempt]
    say(f"{record.message.splitlines()[0]}; starting again in {seconds:g} s")
    time.sleep(seconds)
    return True


def _launch(
    program: TrainingProgram, start: LaunchPlan, hosts: Placement, step: int | None
) -> RankRecord:
    """Run the ranks to their end. step: of the checkpoint that they resume from; None without one."""
    _end_if_stuck(program, start.machine, program.first_step if step is None else step)
    try:
        return program.launch(start, hosts, step)
    except (nodes.NodesFailed, slurm.NodeUnfit) as err:
        # Nodes that do not see `results` could not be given what they need, or the first node of the
        # ranks named no port at which they could meet.
        failed = err.failures if isinstance(err, nodes.NodesFailed) else hosts.hosts
        # A first node may start other commands all the same: as after a hang, it is checked and avoided.
        cause = lost_ranks.HANG if isinstance(err, slurm.NodeUnfit) else lost_ranks.PEER_LOST
        host = next(iter(failed))
        return RankRecord("lost", code=err.code, cause=cause, message=err.what, host=host)
    except DiskFull as err:  # before any rank started
        if start.job is None:
            raise
        return RankRecord("failed", code=err.code, cause=DiskFull.__name__, message=str(err))


def _at_fault(
    record: RankRecord, config: ResolvedConfig, start: LaunchPlan, placement: Placement
) -> dict[str, str]:
    """The nodes that must not train again, and why; {} for none. The node whose rank hung is checked, and
    all of them where the ranks lost each other and their records blame nobody.

    placement: the nodes of the ranks.
    """
    blamed = placement.only([record.host])
    if placement.job is None or (record.host and not blamed.hosts):
        return {}
    if record.cause == lost_ranks.GPU_FAULT:
        return {record.host: record.message}
    if record.cause == lost_ranks.HANG:
        say(f"checking {record.host}, on which a rank hung, or none could start …")
    elif record.cause == lost_ranks.PEER_LOST and not record.host and placement.hosts:
        say(f"checking {', '.join(placement.hosts)}: nothing tells which rank is to blame …")
        blamed = placement
    else:
        return {}
    try:
        troubles = recheck(config, start.machine, start.layout, blamed, start.staged)
    except slurm.SlurmSilent:  # nothing is known of the nodes
        return {}
    return {host: f"{record.message}; checked: {why}" for host, why in troubles.items()}


def _end_if_stuck(program: TrainingProgram, machine: Machine, step: int) -> None:
    """Crash-loop detection: records and raises the TrainingError, instead of another launch."""
    log, config = program.paths.events, program.config
    try:
        crash_loop.refuse_if_stuck(log, step, machine.max_restarts_without_progress)
    except TrainingError as err:
        record = RankRecord("failed", code=err.code, message=str(err))
        _record_failure(config, program.paths, record)
        raise


def _requeue(
    record: RankRecord,
    paths: RunPaths,
    job: slurm.Job,
    machine: Machine,
    *,
    step: int = 0,
) -> None:
    """Requeue the job, which ends this process, or print why it is not requeued.

    step: of the newest checkpoint. Raises StoppedEarly when a requeued job lost ranks: no failure is
    recorded, so that crash-loop detection counts this launch.
    """
    goes_back, reason = requeue.requeue(record, paths, job, machine, step=step)
    if reason:
        say(f"not requeued: {reason}")
    if goes_back and record.status == "lost":
        raise StoppedEarly(f"{record.what}; job {job.id} resumes from step {step}")


def _committed_step(program: TrainingProgram) -> int:
    """The step of the newest checkpoint that counts; that at which the run begins without one."""
    latest = program.checkpoints.latest()
    return latest.step if latest else program.first_step


def _conclude(program: TrainingProgram, record: RankRecord, start: LaunchPlan) -> Path:
    """Write trained.json for a completed run, else raise the error that the record stands for."""
    config, paths = program.config, program.paths
    if record.status == "completed":
        assert record.step is not None
        return _write_trained(program, record.step)
    if not record.is_failure:
        step = _committed_step(program)
        events.record(paths.events, events.Stop(cause=record.cause, step=step))
        raise StoppedEarly(
            f"{config.run} stopped at step {step} of {config.goal} ({record.cause});"
            f" {_what_is_kept(record, step, program.first_step)}",
            fix="rerun the same command to resume",
        )
    _record_failure(config, paths, record)
    if record.cause == lost_ranks.NOT_STARTED:
        raise UnfitError(
            f"no rank was started: {record.what}",
            fix="ask `sinfo`; rerun the same command when Slurm answers and starts processes",
        )
    if record.status == "lost" and (record.exit_status or 0) <= 0:
        raise UnfitError(
            f"ranks were lost, and restarts did not help: {record.what}",
            cause=_why_lost(record, start.machine),
            fix=f"read the ranks' logs in {paths.logs}, then rerun the same command",
        )
    raise RankFailure(record, paths.logs)


def _why_lost(record: RankRecord, machine: Machine) -> str:
    """The likely cause of a loss, for people."""
    if record.cause in (lost_ranks.GPU_FAULT, lost_ranks.GPU_ERROR):
        return (
            f"a GPU of {record.host} is broken (see nvidia-smi -q and dmesg there), or a kernel is"
        )
    if record.cause == lost_ranks.HANG:
        return (
            f"a file system, a GPU or {record.host} itself does not respond; where the rank could tell,"
            " the stacks of its threads are in its log"
        )
    killed = "the system killed them (out of memory?), or a node or the network fails"
    if machine.container and record.message == NO_RECORD:
        return f"their container does not start, which forge preflight explains; or {killed}"
    return killed


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
    with suppress(DiskFull):  # of which the message itself tells, with more
        events.record(paths.events, failed)


def _write_trained(program: TrainingProgram, step: int) -> Path:
    path = program.paths.trained
    program.trained(step).write(path)
    shutil.rmtree(kernels_folder(program.paths.root), ignore_errors=True)
    return path
