"""The machine a run is on: typed `machine.yaml` of a profile, and the geometry of its ranks.

Nothing here changes what is trained; it is outside the science digest.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from forge.config import Config, Section, apply_overrides, checked, read_values
from forge.errors import ConfigError


class Fabric(Section):
    """How ranks talk to each other."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Process group backend; `auto` is nccl where every rank has a GPU, else gloo."""
    interface: str | None = None
    """Network interface of the ranks; null finds it on each node for itself."""
    gid_index: int | None = Field(None, ge=0)
    """NCCL_IB_GID_INDEX for clusters that need one."""
    timeout_sec: float = Field(300, gt=0)
    """A collective that takes longer than this ends the rank with an error."""
    debug: bool = False
    """Verbose NCCL and torch.distributed logs."""


class Stage(Section):
    """Where token shards are put for fast reading."""

    mode: Literal["auto", "always", "never"] = "auto"
    """`auto` stages unless the shards already lie on the staging folder's own file system."""
    folder: str | None = None
    """Node-local folder; null: $SLURM_TMPDIR, else $TMPDIR, else /tmp."""


class Preflight(Section):
    """What a node must offer before training starts."""

    deadline_sec: float = Field(90, gt=0)
    """The rank checks must be through by then; what is missing is named."""
    min_free_disk_gib: float = Field(1, ge=0)
    """Free space in the results folder."""
    min_free_memory_gib: float = Field(1, ge=0)
    """Available memory per rank."""
    min_open_files: int = Field(256, ge=0)
    """Soft limit of open files (`ulimit -n`)."""


class Machine(Section):
    """All of machine.yaml."""

    launcher: Literal["process", "torchrun"] = "process"
    """`process` runs one rank; `torchrun` starts the node's ranks."""
    stop_grace_sec: float = Field(60, gt=0)
    """Ranks get this long to commit after a stop signal before they are killed."""
    fabric: Fabric = Fabric()
    stage: Stage = Stage()
    preflight: Preflight = Preflight()


def load_machine(path: str | Path | None, overrides: dict[str, Any] | None = None) -> Machine:
    """The machine in a file (defaults for None) with dotted overrides. Raises ConfigError."""
    values = read_values(path) if path else {}
    machine: Machine = checked(
        Machine, apply_overrides(values, overrides or {}), str(path or "the machine")
    )
    return machine


@dataclass(frozen=True)
class Geometry:
    """How many ranks are where. From the profile's resources or the command line."""

    nodes: int = 1
    ranks_per_node: int = 1

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node


def check_geometry(machine: Machine, geometry: Geometry, config: Config) -> None:
    """ConfigError where this launcher cannot give these ranks, or they cannot share the batch."""
    if geometry.nodes < 1 or geometry.ranks_per_node < 1:
        raise ConfigError(
            f"nodes {geometry.nodes} and ranks per node {geometry.ranks_per_node} must be 1 or more"
        )
    if geometry.nodes > 1:
        raise ConfigError(
            f"{geometry.nodes} nodes with the launcher {machine.launcher}, which serves one node",
            fix="use --nodes=1",
        )
    if machine.launcher == "process" and geometry.ranks_per_node > 1:
        raise ConfigError(
            f"{geometry.ranks_per_node} ranks with the launcher process, which runs one",
            fix="set `launcher: torchrun` in machine.yaml, or use --ranks-per-node=1",
        )
    if config.train.batch_size % geometry.world_size:
        fits = [
            n for n in range(1, config.train.batch_size + 1) if config.train.batch_size % n == 0
        ]
        raise ConfigError(
            f"train.batch_size {config.train.batch_size} cannot be shared by a world of"
            f" {geometry.world_size} ranks",
            fix=f"use a batch_size that is a multiple of {geometry.world_size}, or one of these"
            f" world sizes: {', '.join(map(str, fits))}",
        )
