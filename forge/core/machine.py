"""Settings of the machine that a run uses: the typed `machine.yaml` of a profile.

No setting here changes the result of training, so the config digest does not cover them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from forge.core.config import FilePath, Section, apply_overrides, checked, read_values

# What timers of other programs take (poll counts milliseconds in 32 bits): 11 days.
MAX_SEC = 10**6


class Fabric(Section):
    """How ranks talk to each other."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Process group backend; `auto` is nccl where every rank has a GPU, else gloo."""
    interface: str | None = None
    """Network interface of the ranks; null finds it on each node for itself."""
    interfaces: dict[str, str] = Field(default={})
    """Interface by node name, for nodes where it has another name; wins over all else."""
    infiniband: Literal["auto", "never"] = "auto"
    """`auto` uses InfiniBand where an interface of it is up; `never` also not then."""
    gid_index: int | None = Field(None, ge=0)
    """NCCL_IB_GID_INDEX for clusters that need one."""
    timeout_sec: float = Field(300, gt=0, le=MAX_SEC)
    """A collective that takes longer than this ends the rank with an error."""
    debug: bool = False
    """Verbose NCCL and torch.distributed logs."""


class Stage(Section):
    """Where token shards are put for fast reading."""

    mode: Literal["auto", "always", "never"] = "auto"
    """`auto` reads in place on the staging folder's own file system, and on a shared one that a
    measurement on the node finds fast enough (1000 random reads/s, 500 MiB/s); else it stages."""
    folder: FilePath | None = None
    """Node-local folder; null: $SLURM_TMPDIR, else $TMPDIR, else /tmp."""
    keep: bool = False
    """Leave the shards on the nodes when the job ends, for the next run on the same nodes."""
    project: bool = False
    """Also put the code and its Python environment on the nodes, for nodes that do not see them."""


class Preflight(Section):
    """What a node must offer before training starts."""

    deadline_sec: float = Field(90, gt=0, le=MAX_SEC)
    """The rank checks must be through by then; what is missing is named."""
    min_free_disk_gib: float = Field(1, ge=0)
    """Free space in the results folder."""
    min_free_memory_gib: float = Field(1, ge=0)
    """Available memory per rank."""
    min_open_files: int = Field(256, ge=0)
    """Soft limit of open files (`ulimit -n`)."""
    max_clock_skew_sec: float = Field(5, gt=0, le=MAX_SEC)
    """Clocks of nodes may differ by this much; more only warns."""
    slow_factor: float = Field(2, gt=1)
    """A node slower than the median of the nodes by this factor is named; it only warns."""
    spare_nodes: int = Field(0, ge=0)
    """The allocation asks for this many nodes more; unfit ones are left out of training."""


class Slurm(Section):
    """What Slurm is asked for, and what follows when it takes the nodes away."""

    warn_sec: int = Field(120, ge=0, le=65535)
    """Ranks get SIGUSR1 this long before the time limit, to commit and leave. Slurm may be 30 s late."""
    max_restarts: int = Field(50, ge=0)
    """A job that was restarted this often is not sent back to the queue again."""
    when_running: Literal["stop", "wait"] = "stop"
    """A job of this run is in the queue already: say so and stop, or wait for it and go on."""
    exclude: list[str] = Field(default=[])
    """Nodes never to use, beside those in the run's bad_nodes.txt."""
    options: str = ""
    """More options for sbatch, as on its command line, such as `--mail-type=FAIL`."""


class Machine(Section):
    """All of machine.yaml."""

    launcher: Literal["single", "torchrun", "srun"] = "single"
    """`single` runs one rank here; `torchrun` starts each node's ranks, under Slurm by one srun task
    a node; `srun` starts every rank itself."""
    stop_grace_sec: float = Field(60, gt=0, le=MAX_SEC)
    """Ranks get this long to commit after a stop signal before they are killed."""
    async_save: bool = True
    """Checkpoints are written while training goes on, from a copy of the state in host memory. With
    false, or too little memory, training waits for each save."""
    max_minutes: float | None = Field(None, gt=0, le=10**7)
    """Training stops with a checkpoint before this many minutes have passed, for machines that are
    reclaimed without warning; null: no limit but Slurm's, which is asked for."""
    max_restarts_without_progress: int = Field(5, ge=1)
    """The run ends after this many starts in a row without a new checkpoint, with the reason of each."""
    fabric: Fabric = Fabric()
    stage: Stage = Stage()
    preflight: Preflight = Preflight()
    slurm: Slurm = Slurm()


def load_machine(path: str | Path | None, overrides: dict[str, Any] | None = None) -> Machine:
    """The machine in a file (defaults for None) with dotted overrides. Raises ConfigError."""
    values = read_values(path) if path else {}
    machine: Machine = checked(
        Machine, apply_overrides(values, overrides or {}), str(path or "the machine")
    )
    return machine
