"""Launch the ranks of one task, forward stop signals, and derive the outcome from the rank records."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import psutil

from forge.core import events, hooks
from forge.core.errors import Exit, ForgeError, UnfitError
from forge.core.file_list import FileList
from forge.core.files import read_object_or_empty, write_json
from forge.core.hooks import BeginLaunch, RunDirectories
from forge.core.machine import Machine
from forge.core.paths import RunPaths, kernels_folder
from forge.core.process import Process, hostname, stop_with_parent
from forge.core.records import StageRecord
from forge.core.terminal import duration, say
from forge.hosts import network, rendezvous
from forge.hosts.nodes import UnresponsiveNodes
from forge.hosts.placement import Placement, WorldLayout
from forge.launch import lost_ranks
from forge.launch.launch_command import launch_command
from forge.launch.rank_output import Console
from forge.launch.rank_records import (
    NO_RECORD,
    LaunchSpec,
    ProgramTask,
    RankRecord,
    RecordsSoFar,
    Task,
    TrainTask,
    reserve,
)
from forge.launch.stop_signal import SIGNAL_CAUSES
from forge.slurm import slurm

# Ranks of a killed command get this long to commit and exit before the next one starts.
ORPHAN_WAIT_SEC = 30.0
MAX_RESTARTS_AFTER_LOSS = 2
# srun waits for a lost node until Slurm notices, which may take minutes. After the record of a failed
# rank, the other ranks get this long to write theirs.
AFTER_FAILURE_SEC = 10.0

# After SIGKILL, only a process stays that waits in the kernel, for a file system or a device.
KILL_SEC = 30.0

POLL_SEC = 0.05  # between two looks at the launch command and at stop signals
# Between two looks at the files of the ranks, which may be on a file system that many runs share.
LOOK_SEC = 1.0


@dataclass(frozen=True)
class LaunchPlan:
    """Machine, world layout and deadline of a launch of the ranks. Times are seconds since the epoch."""

    machine: Machine
    layout: WorldLayout
    staged: StageRecord
    require_checkpoint: bool = False
    deadline: float | None = None  # from max_minutes or the job's time limit, whichever is earlier
    own_deadline: float | None = None  # from max_minutes alone
    job: slurm.Job | None = None  # of this command, also where its ranks need no srun


def run_ranks(
    task: Task,
    paths: RunPaths,
    machine: Machine,
    layout: WorldLayout,
    *,
    placement: Placement | None = None,
    python: str = sys.executable,
    deadline_sec: float | None = None,
    checkpoint: FileList | None = None,
) -> RankRecord:
    """Start the ranks, wait for them (at most `deadline_sec`), and return one record for all of them.

    placement: exactly layout.nodes hosts; None for this host. python: the interpreter of the ranks.
    checkpoint: to resume from, for nodes that do not see the run's directory (`stage.results`).
    The outcome comes from the rank records, never from the exit status of the launch command: torchrun
    turns every code into 1. A rank without a record is `lost`. Raises SlurmSilent where Slurm itself is
    the reason that no rank starts, NodeUnfit where the first node does not answer, EndpointError, and
    as `Hooks.run_directories`.

    In the directory of a run: with its lock held, and after `wait_for_orphans`.
    """
    placement = placement or Placement.here()
    begin = hooks.run_directories(paths, machine, placement, python=python, checkpoint=checkpoint)
    job, master = placement.job, None
    if job or rendezvous.is_asked_for(machine.fabric):
        job_id = job.id if job else ""
        python = placement.python(python)
        hosts, container = placement.hosts, placement.container
        sec = min(deadline_sec or rendezvous.PROBE_SEC, rendezvous.PROBE_SEC)
        master = rendezvous.endpoint(
            machine.fabric, job_id, hosts, python, container, timeout_sec=sec
        )
    spec = _spec(task, paths, machine, layout, placement, master=master)
    spec.write(spec.path)
    reserve(spec)
    if isinstance(task, TrainTask | ProgramTask):
        _record_launch(paths, spec, placement, step=task.step)
    nodes = UnresponsiveNodes(placement)
    try:
        stopped = _run_on_nodes(
            spec,
            paths,
            placement,
            nodes=nodes,
            python=python,
            begin=begin,
            deadline_sec=deadline_sec,
        )
        records = [RankRecord.read(spec, rank) for rank in range(layout.world_size)]
        records = lost_ranks.with_hosts(records, placement.hosts, layout.ranks_per_node)
        if isinstance(task, TrainTask | ProgramTask):
            _record_errors(paths, records)
            outcome = _outcome(records, stopped)
            is_lost = outcome.status == "lost"
            return replace(outcome, silent=tuple(nodes.names())) if is_lost else outcome
        return _outcome(records, stopped)
    finally:
        if not _living(spec.directory):  # else the next command has to wait for them
            shutil.rmtree(spec.directory, ignore_errors=True)


def _spec(
    task: Task,
    paths: RunPaths,
    machine: Machine,
    layout: WorldLayout,
    placement: Placement,
    *,
    master: tuple[str, int] | None,
) -> LaunchSpec:
    """Spec that the ranks of this launch read. master: where they meet; None for a store of torchrun's
    own."""
    job = placement.job
    return LaunchSpec(
        task=task,
        run=str(paths.root),
        launch=_launch_id(),
        machine=machine,
        nodes=layout.nodes,
        ranks_per_node=layout.ranks_per_node,
        launcher=Process.current(),
        master=master,
        job=job.id if job else None,
        restart=job.restarts if job else 0,
        cpus_per_rank=job.cpus_per_task if job else None,
        threads=placement.threads,
        variables=dict(placement.variables),
        kernels=str(kernels_folder(paths.root).absolute()) if isinstance(task, TrainTask) else "",
    )


def _run_on_nodes(
    spec: LaunchSpec,
    paths: RunPaths,
    placement: Placement,
    *,
    nodes: UnresponsiveNodes,
    python: str,
    begin: BeginLaunch | None,
    deadline_sec: float | None,
) -> list[int]:
    """Start the ranks and wait for their end, with the run's directory on nodes that do not see it; the
    stop signals that were received meanwhile. nodes: asked as soon as a rank has lost others."""
    machine = spec.machine
    log = paths.logs / f"{spec.log_prefix}.{machine.launcher}.log"
    with begin(spec) if begin else nullcontext() as elsewhere:
        path = elsewhere.spec_path if elsewhere else spec.path
        meeting = spec.master or (rendezvous.LOOPBACK, 0)
        command = launch_command(
            machine, spec.layout, placement, path, master=meeting, python=python
        )
        stopped = _run(
            command,
            spec,
            log,
            machine.stop_grace_sec,
            deadline_sec,
            nodes=nodes,
            elsewhere=elsewhere,
        )
        if elsewhere:
            elsewhere.finish()
    return stopped


def _launch_id() -> str:
    """Time and process id. To the millisecond: after the loss of a rank one process starts ranks again,
    within the same second if the run is small."""
    now = datetime.now()
    return f"{now:%Y%m%dT%H%M%S}{now.microsecond // 1000:03d}-{os.getpid()}"


def _record_launch(paths: RunPaths, spec: LaunchSpec, placement: Placement, *, step: int) -> None:
    event = events.Launch(
        launch=spec.launch,
        world_size=spec.layout.world_size,
        launcher=spec.machine.launcher,
        host=hostname(),
        nodes=list(placement.hosts),
        step=step,
        job=spec.job,
        restart=spec.restart if spec.job else None,
    )
    events.record(paths.events, event)
    if spec.job and spec.master:
        say(
            f"launch: job={spec.job} nodes={','.join(placement.hosts)} NNODES={spec.nodes}"
            f" ranks={spec.layout.world_size} MASTER_ADDR={spec.master[0]} MASTER_PORT={spec.master[1]}"
        )


def _record_errors(paths: RunPaths, records: Sequence[RankRecord]) -> None:
    """Record what the ranks say themselves; where no rank tells an error of its own, which ranks say
    nothing. A rank that lost its peers has no error of its own."""
    ended = [record for record in records if record.is_failure and record.message]
    telling = [
        record
        for record in ended
        if record.message != NO_RECORD
        and (record.status, record.cause) != ("failed", lost_ranks.PEER_LOST)
    ]
    alike: dict[str, list[RankRecord]] = defaultdict(list)
    for record in telling or [record for record in ended if record.message == NO_RECORD]:
        alike[re.sub(r"\d+", "#", record.message)].append(record)
    with suppress(UnfitError):  # on a full disk the outcome counts
        for ranks in alike.values():
            event = events.RankError(
                ranks=[record.rank for record in ranks],
                host=ranks[0].host,
                message=ranks[0].message,
            )
            events.record(paths.events, event)


def _run(
    command: list[str],
    spec: LaunchSpec,
    log: Path,
    grace_sec: float,
    deadline_sec: float | None,
    *,
    nodes: UnresponsiveNodes,
    elsewhere: RunDirectories | None = None,
) -> list[int]:
    """Run the launch command to its end; the stop signals that were received meanwhile.

    The terminal shows the messages of rank 0 only; the output of torchrun and of libraries goes to logs.
    """
    patience, trouble = slurm.Patience("starting the ranks"), ""
    log.parent.mkdir(parents=True, exist_ok=True)
    with _stop_signals() as stopped:  # before the child exists, so that it misses none
        while True:
            killed_at = time.monotonic() + deadline_sec if deadline_sec else None
            child, trouble = _run_once(
                command,
                spec,
                log,
                stopped,
                nodes=nodes,
                elsewhere=elsewhere,
                grace_sec=grace_sec,
                killed_at=killed_at,
            )
            if stopped or not patience.again(trouble):
                break
    # Ranks whose launch command was killed exit by themselves; none may write after this returns.
    _wait_until_gone(spec.directory, grace_sec)
    _kill_all(spec, child)
    if trouble and not stopped:
        raise slurm.silent(trouble)
    return stopped


def _run_once(
    command: list[str],
    spec: LaunchSpec,
    log: Path,
    stopped: list[int],
    *,
    nodes: UnresponsiveNodes,
    elsewhere: RunDirectories | None = None,
    grace_sec: float,
    killed_at: float | None,
) -> tuple[subprocess.Popen[bytes], str]:
    """The launch command after its end, and Slurm's own error for which it has started no rank ("" where
    it has started any)."""
    begin = log.stat().st_size if log.exists() else 0
    child = _start(command, log, _environment(spec))
    try:
        register(spec, "launcher", child.pid)
        _watch(child, spec, stopped, grace_sec, killed_at, nodes=nodes, elsewhere=elsewhere)
    except BaseException:  # the lock is released next: no rank may write after that
        _kill_all(spec, child)
        raise
    if not spec.job or any(spec.directory.glob("rank-*.pid")):
        return child, ""
    with open(log, "rb") as file:
        file.seek(begin)
        error = file.read().decode(errors="replace").strip()
    error = error or slurm.controller_trouble()  # srun says nothing while it waits
    return child, error if slurm.is_slurms_own(error) else ""


def _watch(
    child: subprocess.Popen[bytes],
    spec: LaunchSpec,
    stopped: list[int],
    grace_sec: float,
    killed_at: float | None,
    *,
    nodes: UnresponsiveNodes,
    elsewhere: RunDirectories | None = None,
) -> None:
    """Until the launch command ends: show messages of rank 0, forward a stop, kill what hangs. Raises
    UnfitError where the run's directory is gone."""
    forwarded, looked = False, -LOOK_SEC
    records, stopped_ranks = RecordsSoFar(spec), lost_ranks.StoppedRanks(spec)
    with Console(spec.directory) as console:
        while child.poll() is None:
            if stopped and not forwarded:
                forwarded = True
                # srun forwards SIGUSR1 to its tasks; SIGTERM ends it and kills them.
                child.send_signal(signal.SIGUSR1 if spec.job else stopped[0])
                say(f"stopping: {_stopping(spec.task)} …")
                killed_at = killed_at or time.monotonic() + grace_sec
            if (now := time.monotonic()) - looked >= LOOK_SEC:
                looked = now
                with suppress(OSError):  # of a disk that does not answer: the next look may
                    spec.check_run_is_there()
                records.look()
                lost = elsewhere is not None and bool(elsewhere.lost)
                failed = any(record.is_failure for record in records.written)
                if killed_at is None and (lost or failed):
                    killed_at = now + AFTER_FAILURE_SEC
                if any(one.cause in lost_ranks.RESTARTED_CAUSES for one in records.written):
                    nodes.ask()  # a node without power is known after 20 s
                stopped_ranks.look(records.stalled)
                console.show(records.inodes)
            if killed_at and now > killed_at:
                _kill_all(spec, child)
            time.sleep(POLL_SEC)
    with suppress(OSError):
        spec.check_run_is_there()  # ranks that could not write may have ended before the last look


def _environment(spec: LaunchSpec) -> dict[str, str]:
    """The environment of the launch command. Variables of machine.yaml win over exported ones."""
    inherited = dict(os.environ)
    if spec.job:
        inherited = slurm.exported(slurm.environment(), spec.machine.slurm.export)
    return {
        network.LOST_PEER.name: network.LOST_PEER.value,  # before torchrun sets another value
        # Seconds until torchrun kills its ranks; torch 2.11 does not read it and waits for 30.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(max(5, round(spec.machine.stop_grace_sec - 10))),
        **inherited,
        **spec.variables,
    }


def _stopping(task: Task) -> str:
    """Words for how the ranks stop when they are asked to."""
    if not isinstance(task, ProgramTask):
        return "the ranks finish their step and commit a checkpoint"
    stop = task.program.stop
    if stop.signal == "none":
        return "the program is killed, since it cannot be asked to save (program.stop.signal)"
    return f"the program gets {stop.signal}, and is killed after {duration(stop.grace_sec)}"


def _start(command: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with open(log, "a") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the ranks once, through this process
            preexec_fn=stop_with_parent,  # noqa: PLW1509  no threads run yet
        )


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collect stop signals instead of exiting. Only the first signal is forwarded to the ranks: a second
    one would end torchrun's wait for the final save."""
    received: list[int] = []
    before = {n: signal.signal(n, lambda number, _: received.append(number)) for n in SIGNAL_CAUSES}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- the processes of a launch ---------------------------------------------------------------------


def register(spec: LaunchSpec, name: str, pid: int) -> None:
    """Write the identity of a process of this launch, so that a later command can wait for it."""
    write_json(spec.directory / f"{name}.pid", Process.of(pid).to_json())


def _living(folder: Path) -> list[Process]:
    return [process for process in _registered(folder) if process.life() == "alive"]


def _registered(folder: Path) -> list[Process]:
    processes = [_process(path) for path in sorted(folder.glob("*.pid"))]
    return [process for process in processes if process]


def _process(path: Path) -> Process | None:
    """The process registered in a file; None where the file is corrupt."""
    with suppress(KeyError):
        return Process.from_json(read_object_or_empty(path))
    return None


def _wait_until_gone(folder: Path, timeout_sec: float) -> list[Process]:
    end = time.monotonic() + timeout_sec
    while (living := _living(folder)) and time.monotonic() < end:
        time.sleep(0.05)
    return living


def _kill_all(spec: LaunchSpec, child: subprocess.Popen[bytes]) -> None:
    """SIGKILL for what still runs of this launch on this host. Raises UnfitError for processes that have
    not ended after KILL_SEC."""
    if child.poll() is None:
        if spec.job:
            slurm.cancel_step(spec.job, spec.launch)  # a task survives when its srun is killed
        _kill_family(child.pid)  # the directory with the pids of the ranks may be gone
    for process in _living(spec.directory):
        if process.is_here:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
    end = time.monotonic() + KILL_SEC
    with suppress(subprocess.TimeoutExpired):
        child.wait(KILL_SEC)
    left = {process.pid for process in _wait_until_gone(spec.directory, end - time.monotonic())}
    if child.poll() is None:
        left.add(child.pid)
    if left:
        pids = " ".join(map(str, sorted(left)))
        raise UnfitError(
            f"processes of this launch have not ended {KILL_SEC:g} s after kill -9: pid {pids}",
            cause="they wait in the kernel, for a file system or a GPU that does not answer",
            fix=f"see what they wait for: ps -o pid,stat,wchan,args -p {pids.replace(' ', ',')}\n"
            f"         if that stays, restart {hostname()}, or leave it out (slurm.exclude)",
        )


def _kill_family(pid: int) -> None:
    """SIGKILL for a process and all its descendants, which may have sessions of their own."""
    with suppress(psutil.NoSuchProcess):
        first = psutil.Process(pid)
        for process in (first, *first.children(recursive=True)):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                process.kill()


def wait_for_orphans(paths: RunPaths) -> None:
    """Wait until the ranks of a killed command have exited; UnfitError names those that do not.

    A command calls it once, with the run's lock held, before anything of the run is read or repaired:
    `run_ranks` returns only when no process of its launch is left.
    """
    for folder in sorted(paths.launches.glob("*/")):
        if living := _living(folder):
            say(f"waiting for {len(living)} processes of an earlier launch to commit and exit …")
            living = _wait_until_gone(folder, ORPHAN_WAIT_SEC)
        if living:
            pids = " ".join(str(process.pid) for process in living)
            raise UnfitError(
                f"processes of an earlier launch still write to {paths.root}: pid {pids}",
                cause="they are stuck in a collective or in a slow file system",
                fix=f"wait, or kill them: kill -9 {pids}"
                + " (in their container)" * any(not process.is_here for process in living),
            )
        _refuse_hidden(folder, paths)
        shutil.rmtree(folder, ignore_errors=True)


def _refuse_hidden(folder: Path, paths: RunPaths) -> None:
    """UnfitError for ranks in another container of this host, which this process cannot see. Those of a
    Slurm job ended with it, which the lock has asked for; those of other hosts commit under the lock of
    their own launcher only."""
    here = Process.current()
    hidden = [
        process
        for process in _registered(folder)
        if process.life() == "unknown" and process.boot_id == here.boot_id and not process.slurm_job
    ]
    if hidden:
        where = ", ".join(
            f"pid {process.pid} of pid namespace {process.pid_namespace}" for process in hidden
        )
        raise UnfitError(
            f"processes of an earlier launch may still write to {paths.root}: {where} on {hostname()}",
            cause="they were started in another container, which is not visible from here",
            fix="if `lsns -t pid` (as root, outside of containers) does not list that namespace any more:"
            f" rm -r {folder}",
        )


# --- the outcome -----------------------------------------------------------------------------------


def _outcome(records: list[RankRecord], stopped: Sequence[int]) -> RankRecord:
    """The verdict, where stop signals were received, with the first of them as the cause."""
    record = verdict(records)
    if stopped and record.status in ("lost", "stopped"):
        # Lost: the signal came before the ranks had their handlers. Stopped: the ranks know only the
        # signal that was forwarded, which may differ from the one received here. The record keeps
        # the numbers of lost ranks.
        cause = SIGNAL_CAUSES[signal.Signals(stopped[0])]
        return replace(record, status="stopped", code=Exit.STOPPED, cause=cause)
    return record


def verdict(records: list[RankRecord]) -> RankRecord:
    """One record for all ranks: that of a failure with a known code, else `lost`, else rank 0's."""
    failed = [
        r for r in records if r.status == "failed" and r.cause not in lost_ranks.RESTARTED_CAUSES
    ]
    if failed:
        return failed[0]
    lost = [r for r in records if r.status == "lost"]
    broken = [r for r in records if r.cause in (lost_ranks.GPU_FAULT, lost_ranks.GPU_ERROR)]
    if broken:
        return replace(broken[0], status="lost", lost=tuple(r.rank for r in (*broken, *lost)))
    if ended := sorted((r for r in lost if r.ended), key=lambda r: r.ended or 0.0):
        # The program of a rank ended; those of the others ended because of it.
        return replace(ended[0], lost=tuple(r.rank for r in lost))
    if lost or any(r.status == "failed" for r in records):
        return lost_ranks.judged(records)
    first = next((r for r in records if r.status != "completed"), records[0])
    bad = next((r.exit_status for r in records if r.exit_status), first.exit_status)
    return replace(first, exit_status=bad)


class RankFailure(ForgeError):
    """The failure of a rank, with its exit code."""

    def __init__(self, record: RankRecord, logs: Path) -> None:
        super().__init__(
            f"rank {record.rank}: {record.message}",
            fix="" if "fix:" in record.message else f"read the ranks' logs in {logs}",
        )
        self.code = Exit(record.code)
