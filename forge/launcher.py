"""Start the ranks of one task, pass signals on, and tell from what they recorded how it ended."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from forge import ledger
from forge.console import Console
from forge.errors import Exit, ForgeError, UnfitError
from forge.launch import Process, hostname, stop_with_parent, user_threads
from forge.machine import Geometry, Machine
from forge.manifest import disk_trouble, read_json, write_json
from forge.paths import RunPaths
from forge.progress import say
from forge.stopping import SIGNAL_CAUSES

# The next command gives orphans of a killed one this long to commit and leave.
ORPHAN_WAIT_SEC = 30.0
MAX_RESTARTS_AFTER_LOSS = 2

POLL_SEC = 0.05
RESERVED_BYTES = 8192

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


@dataclass(frozen=True)
class Spec:
    """What a rank must know, handed over as a file."""

    task: Literal["train", "preflight", "reload"]
    run: str  # the run's folder
    launch: str
    machine: dict[str, Any]
    nodes: int
    ranks_per_node: int
    launcher: dict[str, Any]  # the Process that started the ranks
    threads: str | None = None  # OMP_NUM_THREADS as the user exported it
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return RunPaths(Path(self.run)).launches / self.launch

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.nodes, self.ranks_per_node)

    def write(self) -> Path:
        path = self.folder / "spec.json"
        write_json(path, asdict(self))
        return path

    @classmethod
    def read(cls, path: Path) -> Spec:
        return cls(**read_json(path))


@dataclass(frozen=True)
class Record:
    """How one rank ended, or all of them: what exit codes are made from."""

    status: Literal["completed", "stopped", "failed", "lost"]
    rank: int = 0
    code: int = 0
    step: int | None = None
    cause: str = ""
    message: str = ""
    result: dict[str, Any] = field(default_factory=dict)

    def write(self, spec: Spec) -> None:
        """Leave the record, also on a full disk: into the space that `reserve` has kept."""
        path = spec.folder / f"rank-{self.rank}.json"
        try:
            write_json(path, asdict(self))
        except UnfitError:
            short = asdict(self) | {"message": self.message[: RESERVED_BYTES // 2]}
            with open(path.with_suffix(".reserve"), "r+") as file:
                file.write(json.dumps(short)[:RESERVED_BYTES])

    @classmethod
    def read(cls, spec: Spec, rank: int) -> Record:
        """What this rank left; `lost` if it left nothing."""
        path = spec.folder / f"rank-{rank}.json"
        for file in (path, path.with_suffix(".reserve")):
            if file.exists() and file.read_text().strip():
                return cls(**read_json(file))
        return cls("lost", rank, message="it ended without a word")


def reserve(spec: Spec) -> None:
    """Keep a few blocks of the disk for each rank's last word."""
    for rank in range(spec.geometry.world_size):
        path = spec.folder / f"rank-{rank}.reserve"
        with disk_trouble(path):
            path.write_text(" " * RESERVED_BYTES)


def run_ranks(
    task: Literal["train", "preflight", "reload"],
    paths: RunPaths,
    machine: Machine,
    geometry: Geometry,
    *,
    options: dict[str, Any] | None = None,
    deadline_sec: float | None = None,
) -> Record:
    """Start the ranks, wait for them (at most `deadline_sec`), and give back how they ended.

    The verdict comes from what the ranks recorded, never from the launcher's exit status:
    torchrun turns every code into 1. A rank without a record is `lost`.
    """
    _wait_for_orphans(paths)
    spec = Spec(
        task=task,
        run=str(paths.root),
        launch=f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}",
        machine=machine.model_dump(mode="json"),
        nodes=geometry.nodes,
        ranks_per_node=geometry.ranks_per_node,
        launcher=Process.current().to_json(),
        threads=user_threads(),
        options=options or {},
    )
    command = _command(machine, geometry, spec.write())
    reserve(spec)
    log = paths.logs / f"{machine.launcher}.{spec.launch}.log"
    if task == "train":
        ledger.record(
            paths.events,
            "launch",
            launch=spec.launch,
            world_size=geometry.world_size,
            launcher=machine.launcher,
            host=hostname(),
        )
    try:
        stopped = _run(command, spec, log, machine.stop_grace_sec, deadline_sec)
        record = verdict(_records(spec), spec)
        if record.status == "lost" and stopped:
            # It came before they had their handlers: asked to stop, not lost.
            cause = SIGNAL_CAUSES[signal.Signals(stopped[0])]
            return Record("stopped", code=Exit.STOPPED, cause=cause, message=f"stopped by {cause}")
        return record
    finally:
        shutil.rmtree(spec.folder, ignore_errors=True)


def _command(machine: Machine, geometry: Geometry, spec: Path) -> list[str]:
    entry = ["-m", "forge.rank", str(spec)]
    if machine.launcher == "process":
        return [sys.executable, *entry]
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        f"--nproc-per-node={geometry.ranks_per_node}",
        # Without these SIGUSR1 kills the agent and orphans the ranks.
        "--signals-to-handle=SIGTERM,SIGUSR1,SIGINT",
        f"--shutdown-timeout={max(5, round(machine.stop_grace_sec - 10))}",
        *entry,
    ]


def _run(
    command: list[str], spec: Spec, log: Path, grace_sec: float, deadline_sec: float | None
) -> list[int]:
    """Run the launch command to its end; the stop signals that came meanwhile.

    The console is ours alone: torchrun's own words and what libraries print go to logs, what rank 0
    says to people is shown here.
    """
    killed_at = time.monotonic() + deadline_sec if deadline_sec else None
    with _stop_signals() as stopped:  # before there is a child that one could miss
        child = _start(command, log)
        register(spec, "launcher", child.pid)
        passed_on = False
        with Console(spec.folder) as console:
            while child.poll() is None:
                if stopped and not passed_on:
                    passed_on = True
                    child.send_signal(stopped[0])
                    say("stopping: the ranks finish their step and commit a checkpoint …")
                    killed_at = killed_at or time.monotonic() + grace_sec
                if killed_at and time.monotonic() > killed_at:
                    _kill_all(spec, child)
                time.sleep(POLL_SEC)
                console.show()
    # Ranks whose launcher was killed leave on their own; wait so that nobody writes behind us.
    _wait_until_gone(spec.folder, grace_sec)
    _kill_all(spec, child)
    return stopped


def _start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
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


# --- which processes belong to a launch ------------------------------------------------------------


def register(spec: Spec, name: str, pid: int) -> None:
    """Leave this process's identity, so that a later command can wait for it."""
    write_json(spec.folder / f"{name}.pid", Process.of(pid).to_json())


def _living(folder: Path) -> list[Process]:
    processes = [Process.from_json(read_json(path)) for path in sorted(folder.glob("*.pid"))]
    return [process for process in processes if process.is_here and process.is_alive()]


def _wait_until_gone(folder: Path, timeout_sec: float) -> list[Process]:
    end = time.monotonic() + timeout_sec
    while (living := _living(folder)) and time.monotonic() < end:
        time.sleep(0.05)
    return living


def _kill_all(spec: Spec, child: subprocess.Popen[bytes]) -> None:
    for process in _living(spec.folder):
        os.kill(process.pid, signal.SIGKILL)
    child.wait()


def _wait_for_orphans(paths: RunPaths) -> None:
    """Let ranks of a killed command commit and leave; UnfitError names those that stay."""
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


def _records(spec: Spec) -> list[Record]:
    return [Record.read(spec, rank) for rank in range(spec.geometry.world_size)]


def verdict(records: list[Record], spec: Spec) -> Record:
    """One record for all ranks: a failure with a known code first, then a lost rank, then rank 0."""
    failed = [r for r in records if r.status == "failed" and r.cause != "peer lost"]
    if failed:
        return failed[0]
    lost = [r for r in records if r.status == "lost"]
    orphaned = [r for r in records if r.status == "failed"]
    if lost or orphaned:
        gone = ", ".join(str(r.rank) for r in lost) or "none"
        seen = f"; rank {orphaned[0].rank} saw: {orphaned[0].message}" if orphaned else ""
        return Record(
            "lost",
            rank=lost[0].rank if lost else orphaned[0].rank,
            code=Exit.UNFIT,
            cause="peer lost",
            message=f"ranks without a record: {gone} of {len(records)}{seen}",
            result={"lost": [r.rank for r in lost]},
        )
    return records[0]


class RankFailure(ForgeError):
    """What a rank said when it failed, with its exit code."""

    def __init__(self, record: Record, logs: Path) -> None:
        super().__init__(
            f"rank {record.rank}: {record.message}",
            fix="" if "fix:" in record.message else f"read the ranks' logs in {logs}",
        )
        self.code = Exit(record.code)
