"""Rank, world size and rendezvous endpoint of this process, from the environment of any launcher."""

from __future__ import annotations

import os
from dataclasses import dataclass

from forge.core.errors import ConfigError

RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


@dataclass(frozen=True)
class Rank:
    """The numbers of one rank."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def refuse_left_over() -> None:
    """ConfigError where a variable of a rank is set already. Called by processes that start ranks, before
    anything else: each rank inherits the environment, and all of them would have the same number."""
    inherited = _inherited()
    if inherited:
        raise _left_over(inherited, "which a launcher sets for each of its ranks")


def this_rank(expected_world_size: int, ranks_per_node: int) -> Rank:
    """The rank of this process: RANK, LOCAL_RANK, WORLD_SIZE, else Slurm's variables, else a single rank.

    An empty value counts as none. Sets the three variables for torch and loggers. Raises ConfigError
    when the world size differs from the layout's (a wrong launch line would train one rank), and when
    the values cannot be right (left over in a shell, they are the same for every rank).
    """
    environ = os.environ
    inherited = _inherited()
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
            f"rank {rank.rank} finds a world of {rank.world_size}, expected {expected_world_size}",
            cause="the launcher started another number of ranks, or RANK/WORLD_SIZE are left over"
            " in the environment",
            fix="unset RANK, LOCAL_RANK and WORLD_SIZE, and check nodes and ranks per node",
        )
    return rank


def _inherited() -> dict[str, str]:
    return {name: os.environ[name] for name in RANK_NAMES if os.environ.get(name)}


def _numbers(inherited: dict[str, str]) -> tuple[int, int, int]:
    """RANK, LOCAL_RANK, WORLD_SIZE. inherited: the values before this_rank set them. ConfigError."""
    environ = os.environ
    try:
        rank, local_rank, world_size = (int(environ[name]) for name in RANK_NAMES)
    except ValueError:
        raise _left_over(inherited, "which are not all numbers") from None
    if not (0 <= rank < world_size and 0 <= local_rank < world_size):
        raise _left_over(inherited, f"so this would be rank {rank} of {world_size}")
    task = environ.get("SLURM_PROCID") or str(rank)
    # Slurm's task number is the rank only with one task per rank. torchrun numbers its ranks itself.
    is_task = "TORCHELASTIC_RUN_ID" not in environ and environ.get("SLURM_NTASKS") == str(
        world_size
    )
    if is_task and task != str(rank):
        raise _left_over(inherited, f"but Slurm started this process as task {task}")
    return rank, local_rank, world_size


def _left_over(inherited: dict[str, str], problem: str) -> ConfigError:
    variables = ", ".join(f"{name}={value}" for name, value in inherited.items())
    return ConfigError(
        f"the environment has {variables}, {problem}",
        cause="left over in the shell from another program, or torchrun started this command, although"
        " Forge starts its ranks itself",
        fix=f"unset {' '.join(inherited)}, then rerun the same command",
    )


def rank_for_record(world_size: int) -> int:
    """The rank under which this process writes its record, also when RANK is invalid."""
    number = os.environ.get("RANK", "")
    return min(int(number), world_size - 1) if number.isdecimal() else 0


def set_rendezvous(chosen: tuple[str, int] | None) -> str:
    """The host of the rendezvous. Sets MASTER_ADDR and MASTER_PORT to the launcher's choice, if any:
    what the user exported is part of it."""
    if chosen:
        for name, value in zip(("MASTER_ADDR", "MASTER_PORT"), chosen, strict=True):
            os.environ[name] = str(value)
    return os.environ.get("MASTER_ADDR") or "127.0.0.1"
