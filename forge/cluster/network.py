"""Environment variables of the ranks (NCCL, Gloo, threads), as data with reasons; network interfaces."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from forge.cluster.placement import WorldLayout
from forge.core.machine import Fabric, Machine
from forge.core.process import hostname


@dataclass(frozen=True)
class Setting:
    """One environment variable for a rank."""

    name: str
    value: str
    reason: str
    won: bool = True  # False: the user had exported another value, which stays


def apply(settings: list[Setting], *, user_threads: str | None) -> list[Setting]:
    """Set each variable that the user has not; the list tells which value won.

    user_threads: the user's own OMP_NUM_THREADS. Any other value there is the launcher's: torchrun
    sets 1, Snakemake (under four names) the cores of the whole rule for each rank.
    """
    for name in (
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "NUMEXPR_NUM_THREADS",
    ):
        os.environ.pop(name, None)
    if user_threads:
        os.environ["OMP_NUM_THREADS"] = user_threads
    outcome = []
    for setting in settings:
        value = os.environ.setdefault(setting.name, setting.value)
        outcome.append(Setting(setting.name, value, setting.reason, value == setting.value))
    return outcome


def rank_settings(
    machine: Machine, layout: WorldLayout, master: str, *, cpus: int | None = None
) -> list[Setting]:
    """What each rank needs before torch is imported. Read on the rank's own node.

    cpus: cores of one rank as Slurm gave them; None shares out those this process may use.
    """
    fabric = machine.fabric
    threads = cpus or max(1, available_cores() // layout.ranks_per_node)
    settings = [
        Setting("OMP_NUM_THREADS", str(threads), "the node's cores shared out among its ranks"),
        Setting("TOKENIZERS_PARALLELISM", "false", "no thread pool beside the training threads"),
        *OFFLINE,
    ]
    infiniband = _usable_infiniband(fabric)
    interface, reason = choose_interface(fabric, master)
    if interface:
        settings += [
            Setting("GLOO_SOCKET_IFNAME", interface, reason),
            Setting("NCCL_SOCKET_IFNAME", interface, reason),
        ]
    if infiniband:
        settings += [
            Setting("NCCL_IB_DISABLE", "0", "this node has InfiniBand"),
            Setting("NCCL_NET_GDR_LEVEL", "2", "GPU direct RDMA within one PCIe switch"),
        ]
        if fabric.gid_index is not None:
            settings.append(
                Setting("NCCL_IB_GID_INDEX", str(fabric.gid_index), "from machine.yaml")
            )
    else:
        why = "fabric.infiniband: never" if fabric.infiniband == "never" else "no InfiniBand is up"
        settings.append(Setting("NCCL_IB_DISABLE", "1", why))
    if fabric.debug:
        settings += DEBUG
    return settings


def choose_interface(fabric: Fabric, master: str) -> tuple[str | None, str]:
    """This node's interface for ranks and why: the profile's word, else InfiniBand, else the route."""
    if named := fabric.interfaces.get(hostname()):
        return named, f"fabric.interfaces of {hostname()}"
    if fabric.interface:
        return fabric.interface, "fabric.interface"
    if found := _usable_infiniband(fabric):
        return found, "InfiniBand with an address"
    return interface_towards(master), f"routes to {master}"


def _usable_infiniband(fabric: Fabric) -> str | None:
    return None if fabric.infiniband == "never" else infiniband_interface()


# Compute nodes have no internet: a library that tries waits for minutes, then fails.
OFFLINE = [
    Setting(name, "1", "ranks never reach for the internet")
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
]

DEBUG = [
    Setting("NCCL_DEBUG", "INFO", "fabric.debug"),
    Setting("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "fabric.debug"),
    Setting("PYTHONUNBUFFERED", "1", "fabric.debug"),
]


def available_cores() -> int:
    """Cores this process may use, which under Slurm are fewer than the node has."""
    return len(os.sched_getaffinity(0))


def available_memory() -> int:
    """Bytes that this process may still take: what the node has left, within its cgroups' limits."""
    left = int(psutil.virtual_memory().available)
    group = Path("/proc/self/cgroup")
    with contextlib.suppress(OSError, ValueError):
        # "0::/path" is the one line of cgroup v2; Slurm puts the job's limit on a folder above.
        path = Path("/sys/fs/cgroup") / group.read_text().partition("0::/")[2].strip()
        for folder in (path, *path.parents):
            limit = folder / "memory.max"
            if limit.exists() and (most := limit.read_text().strip()) != "max":
                used = int((folder / "memory.current").read_text())
                left = min(left, int(most) - used + _file_cache(folder))
    return left


def _file_cache(cgroup: Path) -> int:
    """Bytes of the cgroup's memory that hold content of files: the kernel gives them up when asked.
    Reading the shards and a checkpoint fills them."""
    facts = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    return int(facts["active_file"]) + int(facts["inactive_file"])


def infiniband_interface() -> str | None:
    """The first InfiniBand interface that is up and carries an IPv4 address."""
    up = psutil.net_if_stats()
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        # Type 32 is ARPHRD_INFINIBAND, <linux/if_arp.h>; a name such as ib0 is only a custom.
        kind = Path(f"/sys/class/net/{name}/type")
        if not kind.exists() or kind.read_text().strip() != "32":
            continue
        if up[name].isup and any(address.family == socket.AF_INET for address in addresses):
            return name
    return None


def interface_towards(address: str) -> str | None:
    """The interface that the kernel would use to reach `address`; None where it cannot tell."""
    try:
        family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # UDP: chooses a route, sends nothing
            mine = ipaddress.ip_address(probe.getsockname()[0])
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        for found in addresses:
            if (
                found.family == family
                and ipaddress.ip_address(found.address.partition("%")[0]) == mine
            ):
                return name
    # Any address of 127.0.0.0/8 is the loopback interface, which lists one of them only.
    return "lo" if mine.is_loopback and "lo" in psutil.net_if_addrs() else None
