"""The process of one rank: `python -m forge.worker SPEC`. Runs the task of the spec, writes a record."""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import replace
from pathlib import Path

from forge.core import terminal
from forge.core.config import ResolvedConfig, checked, read_values
from forge.core.errors import Exit, ForgeError
from forge.core.files import disk_trouble
from forge.core.paths import RunPaths
from forge.core.process import (
    fast_imports,
    hostname,
    limit_core_dumps,
    raise_open_files,
    stop_with_parent,
)
from forge.hosts import network
from forge.launch import kernel_cache, lost_ranks, program_rank, rank_output
from forge.launch.heartbeat import heartbeat
from forge.launch.launcher import register
from forge.launch.lost_ranks import PEER_LOST
from forge.launch.monitor import start_monitor
from forge.launch.rank import Rank, rank_for_record, set_rendezvous, this_rank
from forge.launch.rank_records import (
    LaunchSpec,
    LossesTask,
    PreflightTask,
    ProgramTask,
    RankRecord,
    ReplayTask,
    TrainTask,
)
from forge.launch.stop_signal import StopFlag


def main(spec_path: str) -> int:
    """Run the task of a spec on this rank. Exit status 0 when its record is `completed` or `stopped`."""
    stop_with_parent()
    raise_open_files()
    limit_core_dumps()
    spec = LaunchSpec.read(Path(spec_path))
    paths = RunPaths(Path(spec.run))
    stop = StopFlag().install()
    launcher = spec.launcher
    if launcher.life() == "gone":
        return 1  # the launcher died before stop_with_parent took effect
    try:
        rank = this_rank(spec.layout.world_size, spec.ranks_per_node)
        register(spec, f"rank-{rank.rank}", os.getpid())
        if _looks_for_stop_file(spec, rank):
            stop.stop_file = paths.stop
        with disk_trouble(paths.logs):
            _redirect(paths, spec, rank)
        start_monitor(spec, rank)
        _prepare(spec, rank)
        record = _attempt(spec, paths, rank, stop)
    except ForgeError as err:
        record = _failure(err, rank_for_record(spec.layout.world_size))
    replace(record, host=hostname()).write(spec)
    if record.is_failure:
        # os._exit, since a background thread may be waiting for other ranks in a save.
        sys.stdout.flush()
        os._exit(1)
    return 0


def _looks_for_stop_file(spec: LaunchSpec, rank: Rank) -> bool:
    """Ranks of the trainer tell each other in every step, so one of them asks the file system."""
    return isinstance(spec.task, ProgramTask) or (isinstance(spec.task, TrainTask) and rank.is_main)


def _redirect(paths: RunPaths, spec: LaunchSpec, rank: Rank) -> None:
    """Redirect the output of this rank to its log; rank 0 also sends its messages to the launcher."""
    log = paths.logs / f"{spec.log_prefix}.{hostname()}.{rank.rank}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    terminal.begin_log(sys.stdout)
    if rank.is_main:
        rank_output.speak_to_launcher(spec.directory)


def _prepare(spec: LaunchSpec, rank: Rank) -> None:
    """Set the environment of this rank, before torch is imported, whose thread pool reads it."""
    master = set_rendezvous(spec.master)
    threads = _recorded_threads(spec)
    settings = network.rank_settings(
        spec.machine, spec.layout, master, cpus=spec.cpus_per_rank, threads=threads
    )
    kernel_cache.forget_default()
    settings += [_flight_recorder(spec), kernel_cache.kernel_cache(spec)]
    settings = network.apply(settings, user_threads=None if threads else spec.threads)
    kernel_cache.open_kernel_cache()
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "(torch chooses)")
    banner = (
        f"[RANK {rank.rank}] WORLD_SIZE={rank.world_size} host={hostname()} pid={os.getpid()}"
        f" interface={interface} threads={os.environ['OMP_NUM_THREADS']} launch={spec.launch}"
        f"{_of_job(spec)}"
    )
    lines = [banner, *(f"{s.name}={s.value}   {s.reason}" for s in settings)]
    terminal.write("\n".join(lines), sys.stdout)
    for setting in settings:
        if not setting.won:
            of_machine = setting.name in spec.variables
            where = "environment.variables" if of_machine else "your exported"
            terminal.say(f"keeping {where} {setting.name}={setting.value} {setting.reason}")


def _flight_recorder(spec: LaunchSpec) -> network.Setting:
    """Path prefix of torch's dump of a rank's last collectives; torch appends the rank's number."""
    prefix = RunPaths(Path(spec.run)).logs.absolute() / f"{spec.log_prefix}.flight-recorder."
    return network.Setting(
        network.FLIGHT_RECORDER, str(prefix), "with the other logs, not in ~/.cache"
    )


def _recorded_threads(spec: LaunchSpec) -> int | None:
    """Threads of this rank where a recorded training decides them: always in a replay; in a resume where
    the user has exported no number, the rank has that many cores, and no GPU. In the environment of the
    process: torch.set_num_threads also forbids MKL to choose, by which gradients have other bits."""
    if isinstance(spec.task, ReplayTask):
        return spec.task.threads
    if not isinstance(spec.task, TrainTask) or spec.task.threads is None or spec.threads:
        return None
    if spec.machine.device != "cpu" and network.count_gpus():
        return None
    cores = network.cores_of_rank(spec.ranks_per_node, spec.cpus_per_rank)
    return spec.task.threads if spec.task.threads <= cores else None


def _of_job(spec: LaunchSpec) -> str:
    """Slurm's facts of this rank's job, for its first log line; "" outside of Slurm."""
    if not spec.job:
        return ""
    environ = os.environ
    index = environ.get("SLURM_ARRAY_TASK_ID")
    return (
        f" job={spec.job}{f'_{index}' if index else ''} restart={spec.restart}"
        f" partition={environ.get('SLURM_JOB_PARTITION', '?')}"
        f" master={environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    )


def _attempt(spec: LaunchSpec, paths: RunPaths, rank: Rank, stop: StopFlag) -> RankRecord:
    """The record of the task, also of one that fails."""
    if isinstance(spec.task, ProgramTask):
        return program_rank.run(spec, paths, rank, stop)
    try:
        with fast_imports():
            from forge.launch.process_group import is_peer_loss
    except (ImportError, OSError) as err:  # OSError: a library that torch loads
        terminal.say(traceback.format_exc().rstrip())
        message = f"cannot import torch on {hostname()}: {err}"
        return RankRecord("failed", rank.rank, Exit.UNFIT, cause="environment", message=message)
    try:
        with disk_trouble(paths.root, "read or write"):
            return _do(spec, paths, rank, stop)
    except ForgeError as err:
        return _failure(err, rank.rank)
    except Exception as err:
        if is_peer_loss(err):
            return _peer_lost(err, rank)
        terminal.say(traceback.format_exc().rstrip())
        return _unexpected(
            err, rank, paths.logs / f"{spec.log_prefix}.{hostname()}.{rank.rank}.memory"
        )


def _peer_lost(err: Exception, rank: Rank) -> RankRecord:
    """The record of a rank that has done no wrong itself, or holds up the others. An error outside of a
    named collective does not know what the rank did."""
    record = RankRecord("failed", rank.rank, Exit.UNFIT, cause=PEER_LOST, message=str(err))
    known = {name: getattr(err, name) for name in ("activity", "status") if hasattr(err, name)}
    return replace(record, **{"activity": heartbeat.activity, **known})


def _unexpected(err: Exception, rank: Rank, memory: Path) -> RankRecord:
    """The record of an error that is not a ForgeError: an error of the GPU, or a bug. memory: name of a
    file, without its ending, for what is in a GPU's memory that was too small."""
    if record := lost_ranks.of_gpu_error(err, rank.rank):
        return record
    cause = lost_ranks.cause_of_gpu_error(err)
    message = f"{type(err).__name__}: {err}"
    if cause == lost_ranks.OUT_OF_MEMORY:
        message += (
            "\n  fix:   lower train.micro_batch_size, set train.recompute or train.shard (forge plan"
            " shows what each saves), or use more GPUs"
        )
        from forge.launch.torch_private import dump_memory

        file = memory.with_name(f"{memory.name}.pickle")
        if dump_memory(file):  # while the error still holds the tensors
            message += f"\n  memory: {file} (pytorch.org/memory_viz draws it)"
    return RankRecord("failed", rank.rank, Exit.FAILED, cause=cause or "bug", message=message)


def _failure(err: ForgeError, rank: int) -> RankRecord:
    return RankRecord("failed", rank, err.code, cause=type(err).__name__, message=str(err))


def _do(spec: LaunchSpec, paths: RunPaths, rank: Rank, stop: StopFlag) -> RankRecord:
    from forge.launch.process_group import joined

    task = spec.task
    with joined(rank, spec.machine) as world:
        if isinstance(task, PreflightTask):
            with fast_imports():
                from forge.preflight import rank_probe

            return rank_probe.check(world, task, spec)
        config = checked(ResolvedConfig, read_values(paths.config), str(paths.config))
        if isinstance(task, ReplayTask):
            with fast_imports():
                from forge.validation import replay_rank

            return replay_rank.check(world, config, task)
        if isinstance(task, LossesTask):
            with fast_imports():
                from forge.validation import rank_losses

            return rank_losses.check(world, config, task)
        with fast_imports():
            from forge.trainer import loop

        return loop.train(config, paths, world, stop, spec)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
