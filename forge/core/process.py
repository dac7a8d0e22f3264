"""This host and its processes: host name, identity of a process, termination with its parent."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def hostname() -> str:
    return socket.gethostname().split(".")[0]


def free_port() -> int:
    """A TCP port that is free on this host now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def node_local_folder() -> Path:
    """The directory for node-local data: the job's, else the user's, else /tmp."""
    return Path(os.environ.get("SLURM_TMPDIR") or os.environ.get("TMPDIR") or "/tmp")


@dataclass(frozen=True)
class Process:
    """The identity of a process, which differs from that of any other process with the same pid.

    Made of the kernel's boot id and ticks: the wall clock may jump, and with it the boot time in
    /proc/stat.
    """

    host: str
    pid: int
    boot_id: str  # random, new at each boot
    start_ticks: int  # from boot to its start, in clock ticks
    slurm_job: str | None = None

    @classmethod
    def current(cls) -> Process:
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> Process:
        """The process with this pid on this host. Raises ProcessLookupError without one."""
        found = _state_and_start(pid)
        if found is None:
            raise ProcessLookupError(f"no process {pid} on {hostname()}")
        return cls(hostname(), pid, _boot_id(), found[1], os.environ.get("SLURM_JOB_ID"))

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Process:
        """Raises KeyError when a field is missing; other keys are ignored."""
        return cls(**{field.name: value[field.name] for field in fields(cls)})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def is_here(self) -> bool:
        return self.host == hostname()

    def is_alive(self) -> bool:
        """Whether the process still runs on this host; not a zombie, or another one with its pid."""
        if self.boot_id != _boot_id():
            return False
        found = _state_and_start(self.pid)
        if found is None:
            return _is_hidden(self.pid)
        state, start_ticks = found
        return state not in "ZX" and start_ticks == self.start_ticks


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _state_and_start(pid: int) -> tuple[str, int] | None:
    """State and start ticks, fields 3 and 22 of /proc/PID/stat (man 5 proc); None without a process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # Field 2, the name in brackets, may contain blanks and brackets.
    fields = stat.rpartition(b")")[2].split()
    return fields[0].decode(), int(fields[19])


def _is_hidden(pid: int) -> bool:
    """Whether another user has a process with this pid, which /proc does not show (hidepid)."""
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
    """Whether Snakemake runs this subcommand. Run by hand, `nohup forge train` must survive its shell."""
    return os.environ.get("FORGE_IN_WORKFLOW") == "1"


def user_threads() -> str | None:
    """OMP_NUM_THREADS as the user exported it; Snakemake overwrites the variable for every rule."""
    name = "FORGE_USER_OMP_NUM_THREADS" if in_workflow() else "OMP_NUM_THREADS"
    return os.environ.get(name) or None


@contextmanager
def fast_imports() -> Iterator[None]:
    """Import large packages without garbage collection: torch then takes a sixth less CPU time.

    What was imported stays for good, so that later collections leave it out.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
