"""Launch the ranks of one task, forward signals, and judge the result from the ranks' records."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from forge.cluster import slurm
from forge.cluster.placement import Placement, WorldLayout, launch_line
from forge.core import events
from forge.core.errors import Exit, ForgeError, UnfitError
from forge.core.files import read_object_or_empty, write_json
from forge.core.machine import Machine
from forge.core.paths import RunPaths
from forge.core.process import Process, free_port, hostname, stop_with_parent, user_threads
from forge.core.terminal import say
from forge.launch.rank_output import Console
from forge.launch.rank_records import (
    LaunchSpec,
    PreflightTask,
    RankRecord,
    ReplayTask,
    TrainTask,
    reserve,
    written,
)
from forge.launch.stop_signal import SIGNAL_CAUSES

# The next command gives orphans of a killed one this long to commit and leave.
ORPHAN_WAIT_SEC = 30.0
MAX_RESTARTS_AFTER_LOSS = 2
# srun waits for a node that is gone until Slurm has noticed, which may take minutes. Once a rank has
# said that it failed, the others get this long to say so too.
AFTER_FAILURE_SEC = 10.0

POLL_SEC = 0.05

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def run_ranks(
    task: TrainTask | PreflightTask | ReplayTask,
    paths: RunPaths,
    machine: Machine,
    layout: WorldLayout,
    *,
    placement: Placement | None = None,
    python: str = sys.executable,
    deadline_sec: float | None = None,
) -> RankRecord:
    """Start the ranks, wait for them (at most `deadline_sec`), and give back how they ended.

    placement: exactly layout.nodes hosts; this host when None. python: what runs the ranks.
    The verdict comes from what the ranks recorded, never from the launcher's exit status:
    torchrun turns every code into 1. A rank without a record is `lost`.
    """
    wait_for_orphans(paths)
    placement = placement or Placement.here()
    job = placement.job
    master = _meeting_point(placement, python) if job else None
    spec = LaunchSpec(
        task=task,
        run=str(paths.root),
        launch=f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}",
        machine=machine,
        nodes=layout.nodes,
        ranks_per_node=layout.ranks_per_node,
        launcher=Process.current(),
        master=master,
        job=job.id if job else None,
        restart=job.restarts if job else 0,
        cpus_per_rank=job.cpus_per_task if job else None,
        threads=user_threads(),
    )
    spec.write(spec.path)
    command = launch_line(
        machine, layout, placement, spec.path, master=master or ("", 0), python=python
    )
    reserve(spec)
    log = paths.logs / f"{spec.log_prefix}.{machine.launcher}.log"
    if isinstance(task, TrainTask):
        _record_launch(paths, spec, placement, step=task.step)
    try:
        stopped = _run(command, spec, log, machine.stop_grace_sec, deadline_sec)
        record = verdict(_records(spec), spec)
        if stopped and record.status in ("lost", "stopped"):
            # Lost: it came before they had their handlers, so they were asked to stop. Stopped: they
            # know what was passed on, which may be another signal than the one that came here. Which
            # ranks were lost stays in the result.
            cause = SIGNAL_CAUSES[signal.Signals(stopped[0])]
            return replace(record, status="stopped", code=Exit.STOPPED, cause=cause)
        return record
    finally:
        shutil.rmtree(spec.directory, ignore_errors=True)


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


def _meeting_point(placement: Placement, python: str) -> tuple[str, int]:
    """The first node and a port that is free there now. Raises UnfitError."""
    head = placement.hosts[0]
    if head == hostname():
        return head, free_port()
    assert placement.job
    probe = "from forge.core.process import free_port; print(free_port())"
    return head, int(slurm.output_on(placement.job.id, head, [python, "-c", probe]))


def _run(
    command: list[str], spec: LaunchSpec, log: Path, grace_sec: float, deadline_sec: float | None
) -> list[int]:
    """Run the launch command to its end; the stop signals that came meanwhile.

    The console is ours alone: torchrun's own words and what libraries print go to logs, what rank 0
    says to people is shown here.
    """
    killed_at = time.monotonic() + deadline_sec if deadline_sec else None
    with _stop_signals() as stopped:  # before there is a child that one could miss
        log.parent.mkdir(parents=True, exist_ok=True)
        child = _start(command, log, slurm.environment() if spec.job else None)
        try:
            register(spec, "launcher", child.pid)
            _watch(child, spec, stopped, grace_sec, killed_at)
        except BaseException:  # the lock is about to be given back: nobody may write on
            _kill_all(spec, child)
            raise
    # Ranks whose launcher was killed leave on their own; wait so that nobody writes behind us.
    _wait_until_gone(spec.directory, grace_sec)
    _kill_all(spec, child)
    return stopped


def _watch(
    child: subprocess.Popen[bytes],
    spec: LaunchSpec,
    stopped: list[int],
    grace_sec: float,
    killed_at: float | None,
) -> None:
    """Until the launch command has ended: show what rank 0 says, pass the stop on, end what hangs."""
    passed_on = False
    with Console(spec.directory) as console:
        while child.poll() is None:
            if stopped and not passed_on:
                passed_on = True
                # srun passes SIGUSR1 on to its tasks; of SIGTERM it dies and kills them.
                child.send_signal(signal.SIGUSR1 if spec.job else stopped[0])
                say("stopping: the ranks finish their step and commit a checkpoint …")
                killed_at = killed_at or time.monotonic() + grace_sec
            if killed_at is None and _any_failed(spec):
                killed_at = time.monotonic() + AFTER_FAILURE_SEC
            if killed_at and time.monotonic() > killed_at:
                _kill_all(spec, child)
            time.sleep(POLL_SEC)
            console.show()


def _start(
    command: list[str], log: Path, environment: dict[str, str] | None
) -> subprocess.Popen[bytes]:
    with open(log, "a") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,  # Ctrl-C of the terminal reaches ranks once, through us
            preexec_fn=stop_with_parent,  # noqa: PLW1509  no threads run yet
        )


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collect stop signals instead of dying of them. Only the first one is passed on to the ranks:
    a second one would break off torchrun's wait for the ranks' last save."""
    received: list[int] = []
    before = {n: signal.signal(n, lambda number, _: received.append(number)) for n in STOP_SIGNALS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _any_failed(spec: LaunchSpec) -> bool:
    return any(record.status == "failed" for record in written(spec))


# --- which processes belong to a launch ------------------------------------------------------------


def register(spec: LaunchSpec, name: str, pid: int) -> None:
    """Leave this process's identity, so that a later command can wait for it."""
    write_json(spec.directory / f"{name}.pid", Process.of(pid).to_json())


def _living(folder: Path) -> list[Process]:
    found = [_process(path) for path in sorted(folder.glob("*.pid"))]
    return [process for process in found if process and process.is_here and process.is_alive()]


def _process(path: Path) -> Process | None:
    """Who has registered here; None where the file names no process."""
    with suppress(KeyError):
        return Process.from_json(read_object_or_empty(path))
    return None


def _wait_until_gone(folder: Path, timeout_sec: float) -> list[Process]:
    end = time.monotonic() + timeout_sec
    while (living := _living(folder)) and time.monotonic() < end:
        time.sleep(0.05)
    return living


def _kill_all(spec: LaunchSpec, child: subprocess.Popen[bytes]) -> None:
    if spec.job and child.poll() is None:
        slurm.cancel_step(spec.job, spec.launch)  # its tasks outlive an srun that is killed
    for process in _living(spec.directory):
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    child.wait()


def wait_for_orphans(paths: RunPaths) -> None:
    """Let ranks of a killed command commit and leave; UnfitError names those that stay.

    Under the run's lock, before anything of the run is looked at or mended.
    """
    for folder in sorted(paths.launches.glob("*/")):
        if living := _living(folder):
            say(f"waiting for {len(living)} processes of an earlier start to commit and leave …")
            living = _wait_until_gone(folder, ORPHAN_WAIT_SEC)
        if living:
            pids = " ".join(str(process.pid) for process in living)
            raise UnfitError(
                f"processes of an earlier start still write {paths.root}: pid {pids}",
                cause="they are stuck in a collective or in a slow file system",
                fix=f"wait, or end them: kill -9 {pids}",
            )
        shutil.rmtree(folder, ignore_errors=True)


# --- how it ended ----------------------------------------------------------------------------------


def _records(spec: LaunchSpec) -> list[RankRecord]:
    return [RankRecord.read(spec, rank) for rank in range(spec.layout.world_size)]


def verdict(records: list[RankRecord], spec: LaunchSpec) -> RankRecord:
    """One record for all ranks: a failure with a known code first, then a lost rank, then rank 0."""
    failed = [r for r in records if r.status == "failed" and r.cause != "peer lost"]
    if failed:
        return failed[0]
    lost = [r for r in records if r.status == "lost"]
    orphaned = [r for r in records if r.status == "failed"]
    if lost or orphaned:
        numbers = ", ".join(str(r.rank) for r in lost)
        gone = (
            f"rank {numbers} of {len(records)} exited without a record"
            if lost
            else "ranks lost each other"
        )
        seen = f"; rank {orphaned[0].rank} saw: {orphaned[0].message}" if orphaned else ""
        return RankRecord(
            "lost",
            rank=lost[0].rank if lost else orphaned[0].rank,
            code=Exit.UNFIT,
            cause="peer lost",
            message=f"{gone}{seen}",
            lost=tuple(r.rank for r in lost),
        )
    return records[0]


class RankFailure(ForgeError):
    """What a rank said when it failed, with its exit code."""

    def __init__(self, record: RankRecord, logs: Path) -> None:
        super().__init__(
            f"rank {record.rank}: {record.message}",
            fix="" if "fix:" in record.message else f"read the ranks' logs in {logs}",
        )
        self.code = Exit(record.code)
