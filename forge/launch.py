"""Who am I: rank, world size and Slurm job of this process, from the environment of any launcher."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from forge.errors import ConfigError

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
    ConfigError when the world is not the geometry's: a wrong launch line silently runs one rank.
    """
    environ = os.environ
    for name, slurm_name, alone in (
        ("RANK", "SLURM_PROCID", "0"),
        ("LOCAL_RANK", "SLURM_LOCALID", "0"),
        ("WORLD_SIZE", "SLURM_NTASKS", "1"),
    ):
        environ[name] = environ.get(name) or environ.get(slurm_name) or alone
    rank = Rank(
        int(environ["RANK"]), int(environ["LOCAL_RANK"]), int(environ["WORLD_SIZE"]), ranks_per_node
    )
    if rank.world_size != expected_world_size:
        raise ConfigError(
            f"rank {rank.rank} finds a world of {rank.world_size}, the geometry says"
            f" {expected_world_size}",
            cause="the launcher started another number of ranks, or RANK/WORLD_SIZE are left over"
            " in the environment",
            fix="unset RANK, LOCAL_RANK and WORLD_SIZE, and check nodes and ranks per node",
        )
    return rank


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
    """A process that cannot be mistaken for a later one with the same pid."""

    host: str
    pid: int
    started: float  # seconds since the epoch, as the kernel counts them for this pid
    slurm_job: str | None = None

    @classmethod
    def current(cls) -> Process:
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> Process:
        """A living process on this host. Raises psutil.NoSuchProcess."""
        started = psutil.Process(pid).create_time()
        return cls(hostname(), pid, started, os.environ.get("SLURM_JOB_ID"))

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Process:
        return cls(value["host"], value["pid"], value["started"], value.get("slurm_job"))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def is_here(self) -> bool:
        return self.host == hostname()

    def is_alive(self) -> bool:
        """Whether it runs on this host; a zombie or a reused pid does not count."""
        try:
            found = psutil.Process(self.pid)
            # The boot time behind create_time may move by a tick between two readings.
            same = abs(found.create_time() - self.started) < 1
            return same and found.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
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
