"""Who am I: rank, world size and Slurm job of this process, from the environment of any launcher."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forge.errors import ConfigError

RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


@dataclass(frozen=True)
class Rank:
    """One process of the world."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def this_rank(expected_world_size: int, ranks_per_node: int) -> Rank:
    """This process's rank: RANK, LOCAL_RANK, WORLD_SIZE, else Slurm's names, else the only rank.

    An empty value counts as none. Also sets the three, so that torch and loggers see one shape. Raises
    ConfigError when the world is not the geometry's: a wrong launch line silently runs one rank. And when
    the three cannot be true: left over in a shell, they reach every rank alike.
    """
    environ = os.environ
    inherited = {name: environ[name] for name in RANK_NAMES if environ.get(name)}
    for name, slurm_name, alone in (
        ("RANK", "SLURM_PROCID", "0"),
        ("LOCAL_RANK", "SLURM_LOCALID", "0"),
        ("WORLD_SIZE", "SLURM_NTASKS", "1"),
    ):
        environ[name] = environ.get(name) or environ.get(slurm_name) or alone
    number, local, world = _numbers(inherited)
    rank = Rank(number, local, world, ranks_per_node)
    if rank.world_size != expected_world_size:
        raise ConfigError(
            f"rank {rank.rank} finds a world of {rank.world_size}, the geometry says"
            f" {expected_world_size}",
            cause="the launcher started another number of ranks, or RANK/WORLD_SIZE are left over"
            " in the environment",
            fix="unset RANK, LOCAL_RANK and WORLD_SIZE, and check nodes and ranks per node",
        )
    return rank


def _numbers(inherited: dict[str, str]) -> tuple[int, int, int]:
    """RANK, LOCAL_RANK, WORLD_SIZE. inherited: those that the environment had. Raises ConfigError."""
    environ = os.environ
    try:
        rank, local_rank, world_size = (int(environ[name]) for name in RANK_NAMES)
    except ValueError:
        raise _left_over(inherited, "which are not all numbers") from None
    if not (0 <= rank < world_size and 0 <= local_rank < world_size):
        raise _left_over(inherited, f"so this would be rank {rank} of {world_size}")
    task = environ.get("SLURM_PROCID") or str(rank)
    # Slurm says who this is only where one of its tasks is one rank. torchrun numbers its ranks itself.
    is_task = "TORCHELASTIC_RUN_ID" not in environ and environ.get("SLURM_NTASKS") == str(
        world_size
    )
    if is_task and task != str(rank):
        raise _left_over(inherited, f"but Slurm started this process as task {task}")
    return rank, local_rank, world_size


def _left_over(inherited: dict[str, str], problem: str) -> ConfigError:
    found = ", ".join(f"{name}={value}" for name, value in inherited.items())
    return ConfigError(
        f"the environment has {found}, {problem}",
        cause="left over in the shell from another program",
        fix=f"unset {' '.join(inherited)}, then give the same command again",
    )


def rank_for_record(world_size: int) -> int:
    """The number under which this process leaves its record, also where RANK makes no sense."""
    number = os.environ.get("RANK", "")
    return min(int(number), world_size - 1) if number.isdecimal() else 0


def meeting_point(proposed: tuple[str, int] | None) -> str:
    """The host where ranks meet. MASTER_ADDR and MASTER_PORT stay where the user or torchrun has set
    them; else they become the launcher's proposal."""
    if proposed:
        for name, value in zip(("MASTER_ADDR", "MASTER_PORT"), proposed, strict=True):
            os.environ[name] = os.environ.get(name) or str(value)
    return os.environ.get("MASTER_ADDR") or "127.0.0.1"


def hostname() -> str:
    return socket.gethostname().split(".")[0]


def free_port() -> int:
    """A TCP port of this host that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def node_local_folder() -> Path:
    """Where this node has fast storage of its own: the job's folder, else the user's, else /tmp."""
    return Path(os.environ.get("SLURM_TMPDIR") or os.environ.get("TMPDIR") or "/tmp")


@dataclass(frozen=True)
class Process:
    """A process that cannot be mistaken for another one with the same pid.

    Known by the kernel's own counts: wall clocks jump, and what is derived from them jumps along
    (the boot time in /proc/stat does).
    """

    host: str
    pid: int
    boot_id: str | None  # random, new at each boot. None in files of earlier versions of Forge
    start_ticks: int | None  # from boot to its start, in clock ticks
    slurm_job: str | None = None

    @classmethod
    def current(cls) -> Process:
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> Process:
        """A process on this host that nobody has reaped yet. Raises ProcessLookupError."""
        found = _state_and_start(pid)
        if found is None:
            raise ProcessLookupError(f"no process {pid} on {hostname()}")
        return cls(hostname(), pid, _boot_id(), found[1], os.environ.get("SLURM_JOB_ID"))

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Process:
        known = (value.get(name) for name in ("boot_id", "start_ticks", "slurm_job"))
        return cls(value["host"], value["pid"], *known)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def is_here(self) -> bool:
        return self.host == hostname()

    def is_alive(self) -> bool:
        """Whether it runs on this host; a zombie or a reused pid does not count.

        Of a process that an earlier version of Forge wrote down only the pid is known: any living
        process with it counts, for two writers are worse than one that has to ask.
        """
        if self.boot_id not in (None, _boot_id()):
            return False
        found = _state_and_start(self.pid)
        if found is None:
            return _is_hidden(self.pid)
        state, start_ticks = found
        return state not in "ZX" and (self.boot_id is None or start_ticks == self.start_ticks)


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _state_and_start(pid: int) -> tuple[str, int] | None:
    """Fields 3 and 22 of /proc/PID/stat (man 5 proc); None where no such process is seen."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # Field 2, the name in brackets, may hold blanks and brackets.
    fields = stat.rpartition(b")")[2].split()
    return fields[0].decode(), int(fields[19])


def _is_hidden(pid: int) -> bool:
    """Whether another user's process has this pid where /proc shows only one's own (hidepid)."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except ProcessLookupError:
        pass
    return False


_libc = ctypes.CDLL(None, use_errno=True)


def stop_with_parent() -> None:
    """Ask the kernel for a SIGTERM when the parent dies, so that kill -9 leaves no orphans."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def in_workflow() -> bool:
    """Whether Snakemake runs this verb. By hand, `nohup forge train` must survive its shell."""
    return os.environ.get("FORGE_IN_WORKFLOW") == "1"


def user_threads() -> str | None:
    """OMP_NUM_THREADS as the user exported it; Snakemake sets its own for every rule."""
    name = "FORGE_USER_OMP_NUM_THREADS" if in_workflow() else "OMP_NUM_THREADS"
    return os.environ.get(name) or None
