"""Files between launcher and ranks: the launch spec, and the record of each rank."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, TypeAdapter

from forge.core.errors import DataError, UnfitError
from forge.core.files import disk_trouble, inodes_in, read_object_or_empty, write_json
from forge.core.goodput import Interruptions
from forge.core.machine import Machine
from forge.core.paths import RunPaths
from forge.core.process import Process, hostname
from forge.core.program_settings import Program
from forge.core.records import LaunchEnvironment, Record, RecordPart, TextBytes, content
from forge.hosts.placement import WorldLayout
from forge.launch.heartbeat import Activity

FORMAT = 1
SAME_VERSION = "install the same version on all nodes (forge preflight compares them)"
RESERVED_BYTES = 8192
NO_RECORD = "it exited without a record"
STOP_ASKED = "stop"  # in the directory of the launch: the cause, for ranks of another program
# A shared file system that fails over reports errors for seconds (ESTALE, EIO). After the launch a record
# decides what follows, so a disk that reports an error is asked again for so long.
AGAIN_SEC, AGAIN_EVERY_SEC = 10.0, 0.5


# --- the tasks of the ranks ------------------------------------------------------------------------


class TrainTask(RecordPart):
    """Train the run. Times are seconds since the epoch."""

    name: Literal["train"] = "train"
    step: int  # of the checkpoint to resume from, as the launcher sees it
    started: float  # when the launcher began
    staged: dict[str, str]  # host -> directory of the shards on its own disk
    shared: str  # directory of the shards for the other hosts
    require_checkpoint: bool = False
    deadline: float | None = None  # from max_minutes or the job's time limit, whichever is earlier
    own_deadline: float | None = None  # from max_minutes alone
    environment: LaunchEnvironment | None = None  # for the lineage
    interruptions: Interruptions = Interruptions()  # known before this launch
    threads: int | None = None  # a rank, of that checkpoint; None where GPUs have trained it
    text_bytes: dict[str, TextBytes] = Field(
        default_factory=dict
    )  # of validation windows, by source

    @property
    def shards_here(self) -> str:
        """The directory of the shards for the ranks of this host."""
        return self.staged.get(hostname(), self.shared)


class ProgramFolders(RecordPart):
    """The directories that a rank of another program reads; "" for none."""

    cwd: str  # in which it runs
    data: str  # of local inputs: FORGE_DATA
    hub: str  # of downloads: FORGE_HUB

    @property
    def unreadable(self) -> list[str]:
        """The directories that this host cannot read."""
        named = [folder for folder in (self.cwd, self.data, self.hub) if folder]
        return [folder for folder in named if not os.access(folder, os.R_OK | os.X_OK)]


class ProgramTask(RecordPart):
    """Run another training program. Times are seconds since the epoch."""

    name: Literal["program"] = "program"
    program: Program
    step: int  # of the checkpoint to resume from; 0 without one
    resume: str  # path of that checkpoint; "" without one
    goal: int
    restart: int  # launches of this run before this launch
    staged: dict[str, ProgramFolders]  # host -> those with copies on its own disk
    shared: ProgramFolders  # for the other hosts
    deadline: float | None = None  # from max_minutes or the job's time limit, whichever is earlier


class PreflightTask(RecordPart):
    """Check the rendezvous and the collectives of the ranks."""

    name: Literal["preflight"] = "preflight"
    patience_sec: float  # for each step of the check
    nccl_file: str  # NCCL_DEBUG_FILE


class ReplayTask(RecordPart):
    """Load a checkpoint and repeat the training steps after it."""

    name: Literal["replay"] = "replay"
    checkpoint: str
    shards: str
    threads: int | None = None  # a rank, in the training; None where GPUs have trained it
    next_windows: bool = (
        False  # also compute the loss of each window of the step after train.max_steps
    )


class LossesTask(RecordPart):
    """Compute losses and samples of a checkpoint."""

    name: Literal["losses"] = "losses"
    checkpoint: str
    shards: str
    precision: Literal["fp32", "bf16"]  # of the training, for the reference losses
    threads: int | None = None  # for the reference losses; None: those that the process has
    ranks: list[int] = Field(default_factory=list)  # whose reference losses are computed
    eval_samples: int = 0  # of the validation loss; 0: neither that nor samples
    prompts: list[list[int]] = Field(default_factory=list)  # token ids
    sample_tokens: int = 0


Task = Annotated[
    TrainTask | ProgramTask | PreflightTask | ReplayTask | LossesTask, Field(discriminator="name")
]


class LaunchSpec(Record):
    """spec.json: everything that a rank must know."""

    FIX: ClassVar[str] = SAME_VERSION

    task: Task
    run: str  # the run's directory
    launch: str  # the id of this launch
    machine: Machine
    nodes: int
    ranks_per_node: int
    launcher: Process  # the process that starts the ranks
    master: tuple[str, int] | None = None  # rendezvous endpoint; None: torchrun sets it
    job: str | None = None  # id of the Slurm job
    restart: int = 0  # Slurm's restart count of the job
    cpus_per_rank: int | None = None  # None: the ranks share the cores of this process
    threads: str | None = None  # OMP_NUM_THREADS as the user exported it
    variables: dict[str, str] = Field(default_factory=dict)  # of machine.yaml, for the ranks
    kernels: str = ""  # directory of compiled kernels of a run that trains

    @property
    def directory(self) -> Path:
        return RunPaths(Path(self.run)).launches / self.launch

    def check_run_is_there(self) -> None:
        """UnfitError where the directory of the run was removed or moved since the launch: what the ranks
        write would make another one, without config and lock, beside which a second command writes."""
        try:
            os.lstat(self.path)
        except FileNotFoundError:
            raise UnfitError(
                f"{self.run} was removed or moved while its ranks ran: nothing more is written there",
                cause=f"{self.path} is gone, which Forge removes only after the ranks have ended",
                fix="put the directory back and rerun the same command, which resumes; without the"
                " directory the command starts from the beginning",
            ) from None

    @property
    def train_task(self) -> TrainTask:
        """The task, of a launch that trains."""
        assert isinstance(self.task, TrainTask)
        return self.task

    @property
    def layout(self) -> WorldLayout:
        return WorldLayout(self.nodes, self.ranks_per_node)

    @property
    def log_prefix(self) -> str:
        """Prefix of the log names of this launch: `{job}.{restart}`, or `local.{launch}`."""
        return f"{self.job}.{self.restart}" if self.job else f"local.{self.launch}"

    @property
    def path(self) -> Path:
        return self.directory / "spec.json"


# --- results of tasks other than training ---------------------------------------------------------


@dataclass(frozen=True)
class ProbedRank:
    """One rank in the probe. network: that NCCL has named; "" without NCCL. tflop_per_sec: of a matrix
    product. pairs: rank and GB/s of connections to other nodes, on local rank 0. gpu: its name, ""
    on a CPU. copy_gb_per_sec: of copies to it from pinned memory."""

    rank: int
    local_rank: int
    host: str
    device: str
    versions: dict[str, str]
    infiniband: bool
    network: str
    tflop_per_sec: float
    pairs: list[tuple[int, float]]
    gpu: str = ""
    copy_gb_per_sec: float | None = None


@dataclass(frozen=True)
class ProbeResult:
    """Result of the probe of all ranks. Latency and bus bandwidth: of an all-reduce."""

    ranks: list[ProbedRank]
    backend: str
    interface: str
    all_reduce_right: bool
    latency_us: float
    bus_gb_per_sec: float
    kind: Literal["probe"] = "probe"


@dataclass(frozen=True)
class ReplayResult:
    """Result of the replay check. losses: of the steps after the checkpoint, None for one that is not
    finite. finite: the state after them. numerics: as a checkpoint's lineage has them. windows: losses
    of the windows of the next step, in the order of its batch, by the weights after these steps.
    skipped: the steps whose update was skipped."""

    losses: list[float | None]
    finite: bool
    numerics: dict[str, Any]
    windows: list[float | None] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    kind: Literal["replay"] = "replay"


@dataclass(frozen=True)
class LossesResult:
    """Losses and samples of a LossesTask, the same on all ranks; None for a loss that is not finite.

    reference: of each rank that was asked for, with the numerics of the computation. validation: by
    source, the mean loss and its number of tokens. samples: ids that continue each prompt; none after a
    loss that is not finite.
    """

    reference: list[float | None] = field(default_factory=list)
    numerics: dict[str, Any] = field(default_factory=dict)
    validation: dict[str, tuple[float | None, int]] = field(default_factory=dict)
    samples: list[list[int]] = field(default_factory=list)
    kind: Literal["losses"] = "losses"


Result = Annotated[ProbeResult | ReplayResult | LossesResult, Field(discriminator="kind")]


# --- rank records ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankRecord:
    """Record of how one rank ended, or all of them. Exit codes are derived from it."""

    status: Literal["completed", "stopped", "failed", "lost"]
    rank: int = 0
    code: int = 0
    step: int | None = None
    cause: str = ""
    message: str = ""
    weights_digest: str | None = None  # of a completed training, from rank 0
    lost: tuple[int, ...] = ()  # ranks that exited without a record
    exit_status: int | None = None  # of another program; of all ranks: 0 where all are
    host: str = ""  # on which the rank ran
    ended: float | None = None  # of another program: when, in seconds since the epoch
    activity: Activity | None = None  # of Forge's trainer, where a rank hangs or lost a peer
    stopped: int | None = None  # pid of its process, where that is stopped while others wait for it
    connected: tuple[
        str, ...
    ] = ()  # of all ranks: hosts that reached Slurm while their ranks waited
    silent: tuple[str, ...] | None = (
        None  # of all ranks: hosts that start no process; None: not asked
    )
    result: Result | None = None

    @property
    def what(self) -> str:
        """The message of a failure. A message that a rank has written itself gets the rank's number in
        front."""
        return f"rank {self.rank}: {self.message}" if self.ended else self.message

    @property
    def is_failure(self) -> bool:
        """Return whether ranks failed or were lost."""
        return self.status in ("failed", "lost")

    @property
    def all_exited_with_0(self) -> bool:
        """Return whether each rank of another program exited with 0, whether asked to stop or not."""
        return not self.is_failure and self.exit_status == 0

    def write(self, spec: LaunchSpec) -> None:
        """Write the record; on a full disk, into the space that `reserve` has allocated. Without the
        directory of the launch, nothing: nobody waits for the record."""
        path = _path(spec, self.rank)
        if not path.parent.is_dir():
            return
        values = {"format": FORMAT, **asdict(self)}
        try:
            write_json(path, values)
        except UnfitError:
            values["message"] = self.message[: RESERVED_BYTES // 2]
            with open(_reserve(path), "r+") as file:
                file.write(json.dumps(values)[:RESERVED_BYTES])

    def write_provisional(self, spec: LaunchSpec) -> None:
        """Write the record that counts if this rank never writes another record."""
        write_json(_provisional(_path(spec, self.rank)), {"format": FORMAT, **asdict(self)})

    @classmethod
    def read(cls, spec: LaunchSpec, rank: int) -> RankRecord:
        """The record of this rank; `lost` without one. Raises UnfitError where the disk still reports an
        error after AGAIN_SEC, DataError for a record of another version of Forge."""
        end = time.monotonic() + AGAIN_SEC
        while True:
            try:
                return cls._read(spec, rank)
            except (OSError, UnfitError):
                if time.monotonic() > end:
                    raise
            time.sleep(AGAIN_EVERY_SEC)

    @classmethod
    def _read(cls, spec: LaunchSpec, rank: int) -> RankRecord:
        path = _path(spec, rank)
        pid = read_object_or_empty(_stopped(path)).get("pid")
        for file in (path, _reserve(path), _provisional(path)):
            with suppress(FileNotFoundError), disk_trouble(file, "read"):
                if file.read_text().strip():
                    return replace(cls.read_file(file), stopped=pid)
        return cls("lost", rank, message=NO_RECORD, stopped=pid)

    @classmethod
    def read_file(cls, path: Path) -> RankRecord:
        """Raises DataError for a record of another version of Forge."""
        return _RECORD.validate_python(content(path, FORMAT, SAME_VERSION))


_RECORD = TypeAdapter(RankRecord)


class RecordsSoFar:
    """The records that ranks have written while others still run. A look is one read of their directory,
    and of the files that are new or were replaced since the last look."""

    def __init__(self, spec: LaunchSpec) -> None:
        self._folder = spec.directory
        self._read: dict[str, tuple[int, RankRecord]] = {}  # file -> inode, content
        self.inodes: dict[str, int] = {}  # of all files in the directory, at the last look

    def look(self) -> None:
        """Raises DataError for a record of another version of Forge."""
        self.inodes, before = inodes_in(self._folder), self._read
        self._read = {}
        for name, inode in self.inodes.items():
            if not name.startswith("rank-") or not name.endswith((".json", ".provisional")):
                continue
            if name in before and before[name][0] == inode:
                self._read[name] = before[name]
            elif (record := self._record(name)) is not None:
                self._read[name] = inode, record

    def _record(self, name: str) -> RankRecord | None:
        """The record in a file. None where the disk reports an error, which says nothing about the
        ranks: the next look reads it again; and for a provisional one that is withdrawn meanwhile."""
        withdrawn = [DataError] if name.endswith(".provisional") else []
        with suppress(OSError, UnfitError, *withdrawn):
            return RankRecord.read_file(self._folder / name)
        return None

    @property
    def written(self) -> list[RankRecord]:
        """Without provisional ones and the reserved space."""
        return self._with(".json")

    @property
    def stalled(self) -> list[RankRecord]:
        """The records of ranks that are stalled now."""
        return self._with(".provisional")

    def _with(self, suffix: str) -> list[RankRecord]:
        return [record for name, (_, record) in self._read.items() if name.endswith(suffix)]


def mark_stopped(spec: LaunchSpec, rank: int, pid: int | None) -> None:
    """Note that the process of a rank is stopped; None: that it is not."""
    write_json(_stopped(_path(spec, rank)), {"pid": pid})


def pid_file(spec: LaunchSpec, rank: int) -> Path:
    """The file with the identity of the process of a rank, which `launcher.register` writes."""
    return _path(spec, rank).with_suffix(".pid")


def withdraw(spec: LaunchSpec, rank: int) -> None:
    """Remove the provisional record of a rank."""
    _provisional(_path(spec, rank)).unlink(missing_ok=True)


def reserve(spec: LaunchSpec) -> None:
    """Allocate disk space for the record of each rank."""
    for rank in range(spec.layout.world_size):
        path = _reserve(_path(spec, rank))
        with disk_trouble(path):
            path.write_text(" " * RESERVED_BYTES)


def reserves(spec: LaunchSpec, ranks: Iterable[int]) -> list[Path]:
    """The files in which `reserve` has allocated the space of these ranks."""
    return [_reserve(_path(spec, rank)) for rank in ranks]


def _path(spec: LaunchSpec, rank: int) -> Path:
    return spec.directory / f"rank-{rank}.json"


def _reserve(path: Path) -> Path:
    return path.with_suffix(".reserve")


def _provisional(path: Path) -> Path:
    return path.with_suffix(".provisional")


def _stopped(path: Path) -> Path:
    return path.with_suffix(".stopped")
