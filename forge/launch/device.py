"""The device on which each rank computes, chosen by all ranks from what all of them see."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from forge.core.errors import ConfigError, UnfitError
from forge.core.machine import Machine
from forge.core.process import hostname
from forge.hosts.network import MIG, count_gpus, mig_slices
from forge.launch.rank import Rank

SHOWN = 8  # ranks in an error message
# Has NCCL 2.32 and newer connect MIG slices, also those of one GPU (NVIDIA/nccl#1716).
NCCL_ON_SLICES = "NCCL_MULTI_RANK_GPU_ENABLE"


@dataclass(frozen=True)
class Seen:
    """The GPUs of its node that one rank sees.

    gpus: UUIDs of those that torch can use, in the order of their indices; of a MIG slice the name that
    CUDA_VISIBLE_DEVICES has for it. present: number of GPUs of
    the node by its device files, whether or not this process may use them. trouble: why torch can use
    none; "" where it can.
    """

    host: str
    local_rank: int
    gpus: list[str]
    present: int
    trouble: str = ""

    @classmethod
    def here(cls, rank: Rank, wanted: str) -> Seen:
        """The GPUs that this rank sees. With `cpu` wanted, CUDA is not initialized."""
        if wanted == "cpu":
            return cls(hostname(), rank.local_rank, [], 0)
        _take_own_slice(rank)
        uuids = [
            str(torch.cuda.get_device_properties(index).uuid)
            for index in range(torch.cuda.device_count())
        ]
        if uuids:  # slices of one GPU may have its UUID
            uuids = mig_slices()[:1] or uuids
        trouble = "" if uuids else _why_no_gpu()
        return cls(hostname(), rank.local_rank, uuids, count_gpus(), trouble)

    def index(self, ranks_per_node: int) -> int | None:
        """Index of this rank's GPU; None where the rank has none.

        A launcher that binds GPUs to tasks (srun --gpus-per-task) shows each rank its own as index 0.
        """
        if len(self.gpus) >= ranks_per_node:
            return self.local_rank
        return 0 if len(self.gpus) == 1 else None


def choose(ranks: Sequence[Seen], rank: Rank, machine: Machine) -> torch.device:
    """The device of this rank: a GPU of its own on every rank, or the CPU on every rank.

    ranks: what each rank sees, by rank; the same on all ranks, so all raise or none does. Raises
    ConfigError where device: cuda cannot be had or two ranks share a GPU; and with device: auto, where
    a node has GPUs that a rank cannot use, since it would train on its CPU for days unnoticed.
    """
    indices = [seen.index(rank.local_world_size) for seen in ranks]
    if machine.device == "cpu" or (
        machine.device == "auto" and not any(seen.gpus or seen.present for seen in ranks)
    ):
        if machine.fabric.backend == "nccl":
            raise _no_gpus(ranks, indices, rank.local_world_size, machine)
        return torch.device("cpu")
    if None in indices:
        raise _no_gpus(ranks, indices, rank.local_world_size, machine)
    own = [index for index in indices if index is not None]
    _refuse_shared(ranks, own)
    _refuse_slices(ranks, machine)
    return torch.device("cuda", own[rank.rank])


def _no_gpus(
    ranks: Sequence[Seen], indices: Sequence[int | None], ranks_per_node: int, machine: Machine
) -> ConfigError | UnfitError:
    """The error for ranks without a GPU of their own: UnfitError where other ranks have one."""
    without = [rank for rank, index in enumerate(indices) if index is None]
    first = ranks[without[0]]
    listed = ", ".join(f"{rank} ({ranks[rank].host})" for rank in without[:SHOWN])
    more = f" and {len(without) - SHOWN} more" if len(without) > SHOWN else ""
    setting = "fabric.backend is nccl" if machine.device != "cuda" else "device is cuda"
    asked = f", and {setting}" if machine.needs_gpus else ""
    what = (
        f"{len(without)} of {len(ranks)} ranks have no GPU of their own{asked}: rank {listed}{more};"
        f" {first.host} has {first.present} GPUs, rank {without[0]} can use {len(first.gpus)} for"
        f" {ranks_per_node} ranks a node{f': {first.trouble}' if first.trouble else ''}"
    )
    if len(without) < len(ranks):
        return UnfitError(
            what,
            cause="a GPU has fallen off the bus, or these nodes have fewer GPUs than the others",
            fix="run nvidia-smi there, and leave these nodes out (slurm.exclude); to train on CPUs, set"
            " device: cpu in machine.yaml",
        )
    return ConfigError(
        what,
        cause="the job asked for fewer GPUs than ranks, CUDA_VISIBLE_DEVICES hides some, or this torch"
        " cannot use them",
        fix="give each rank a GPU (gres in the profile); to train on CPUs, set device: cpu in"
        " machine.yaml",
    )


def _refuse_shared(ranks: Sequence[Seen], indices: Sequence[int]) -> None:
    users = defaultdict(list)
    for rank, (seen, index) in enumerate(zip(ranks, indices, strict=True)):
        users[seen.host, seen.gpus[index]].append(rank)
    for (host, uuid), sharing in users.items():
        if len(sharing) > 1:
            raise ConfigError(
                f"ranks {', '.join(map(str, sharing))} on {host} share one GPU ({uuid})",
                cause="each rank was shown the same GPU, for example by CUDA_VISIBLE_DEVICES=0, or the"
                " job has fewer GPUs than ranks",
                fix="unset CUDA_VISIBLE_DEVICES, and set tasks_per_node to the number of GPUs of a node",
            )


def _take_own_slice(rank: Rank) -> None:
    """Show this rank the MIG slice of its local rank only, where its node's list has one for each. CUDA
    uses the first slice of the list and no other (NVIDIA's MIG user guide, CUDA_VISIBLE_DEVICES), so that
    all ranks would share it. Before CUDA is initialized."""
    slices = mig_slices()
    if len(slices) > 1 and len(slices) >= rank.local_world_size:
        os.environ["CUDA_VISIBLE_DEVICES"] = slices[rank.local_rank]


def _refuse_slices(ranks: Sequence[Seen], machine: Machine) -> None:
    slices = [rank for rank, seen in enumerate(ranks) if seen.gpus[0].startswith(MIG)]
    if not slices or len(ranks) == 1 or machine.fabric.backend == "gloo":
        return
    if os.environ.get(NCCL_ON_SLICES) == "1":
        return
    first = ranks[slices[0]]
    raise ConfigError(
        f"{len(slices)} of {len(ranks)} ranks have MIG slices (rank {slices[0]} on {first.host}:"
        f" {first.gpus[0]}), and NCCL does not connect slices",
        cause="the job asked for parts of GPUs; NCCL before 2.32 cannot use them together",
        fix="ask for whole GPUs; or train with one rank; or set fabric.backend to gloo and train.shard to"
        f" none, which is slow; or export {NCCL_ON_SLICES}=1 with NCCL 2.32 or newer",
    )


def _why_no_gpu() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return f"CUDA_VISIBLE_DEVICES is {visible!r}"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as err:
        return str(err).splitlines()[0]
    return "CUDA reports no device"
