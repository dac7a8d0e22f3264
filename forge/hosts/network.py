"""Environment variables of the ranks (NCCL, Gloo, threads), as data with reasons; network interfaces, and
ports of InfiniBand and RoCE.

An InfiniBand port needs no IP address for NCCL, and a RoCE port has an ordinary Ethernet interface: so
network interfaces do not tell whether there is RDMA.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from forge.core.config import checked
from forge.core.errors import ConfigError
from forge.core.machine import MAX_SEC, Fabric, Machine
from forge.core.process import hostname
from forge.core.terminal import say
from forge.hosts import rendezvous
from forge.hosts.placement import WorldLayout

INTERFACES = Path("/sys/class/net")


@dataclass(frozen=True)
class Setting:
    """One environment variable for a rank."""

    name: str
    value: str
    reason: str
    won: bool = (
        True  # False: the user's exported value is kept, and the reason says instead of which
    )


def apply(settings: list[Setting], *, user_threads: str | None) -> list[Setting]:
    """Set each variable that the user has not exported; returns the values in effect.

    user_threads: OMP_NUM_THREADS as the user exported it. Other values are removed: torchrun sets 1, and
    Snakemake sets four variables to the cores of the rule, which its ranks must share.
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
        won = value == setting.value
        reason = setting.reason if won else f"in place of {setting.value} ({setting.reason})"
        outcome.append(Setting(setting.name, value, reason, won))
    return outcome


def rank_settings(
    machine: Machine,
    layout: WorldLayout,
    master: str,
    *,
    cpus: int | None = None,
    threads: int | None = None,
) -> list[Setting]:
    """The variables that a rank needs before torch is imported. Called on the node of the rank.

    cpus: cores per rank from Slurm; None divides the cores of this process among the node's ranks.
    threads: of a rank in the training that is to be continued to the last bit; None: one for each core.
    """
    fabric = machine.fabric
    cores = cores_of_rank(layout.ranks_per_node, cpus)
    settings = [
        Setting("OMP_NUM_THREADS", str(threads), "as in the checkpoint")
        if threads
        else Setting("OMP_NUM_THREADS", str(cores), "the node's cores divided by its ranks"),
        Setting(
            "TOKENIZERS_PARALLELISM", "false", "no thread pool in addition to the training threads"
        ),
        *OFFLINE,
    ]
    rdma_reason = uses_rdma(fabric)
    interface, reason = choose_interface(fabric, master)
    if interface:
        settings += [
            Setting("GLOO_SOCKET_IFNAME", interface, reason),
            # Without `=` NCCL takes the name for a prefix: bond0 would be bond0.100 too.
            Setting("NCCL_SOCKET_IFNAME", f"={interface}", reason),
        ]
    if rdma_reason:
        settings.append(Setting("NCCL_IB_DISABLE", "0", rdma_reason))
        if fabric.gid_index is not None and any(port.is_roce for port in active_ports()):
            why = "fabric.gid_index, which NCCL reads for RoCE"
            settings.append(Setting("NCCL_IB_GID_INDEX", str(fabric.gid_index), why))
    else:
        never = fabric.infiniband == "never"
        why = "fabric.infiniband: never" if never else "no port of InfiniBand or RoCE is active"
        settings.append(Setting("NCCL_IB_DISABLE", "1", why))
    settings.append(LOST_PEER)
    if machine.device != "cpu" and count_gpus():
        settings += [RETHROW, _gpu_allocator()]
        # With this variable, start events keep collectives from overlapping with other kernels
        # (github.com/pytorch/pytorch/issues/143890).
        if "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ:
            settings.append(STARTED)
    if fabric.debug:
        settings += DEBUG
    return settings


def _gpu_allocator() -> Setting:
    """Setting of torch's allocator for memory of a GPU. torch reads both names, and which one wins
    differs between its parts: one that the user has exported stays the only one."""
    of_cuda = "PYTORCH_CUDA_ALLOC_CONF"
    name = of_cuda if of_cuda in os.environ else "PYTORCH_ALLOC_CONF"
    return Setting(name, "expandable_segments:True", "no memory of a GPU is lost to fragments")


def with_exported_timeout(machine: Machine) -> Machine:
    """The machine with NCCL_TIMEOUT, if exported, as fabric.timeout_sec. Raises ConfigError."""
    exported, own = os.environ.get("NCCL_TIMEOUT"), machine.fabric.timeout_sec
    if not exported:
        return machine
    try:
        fabric = checked(Fabric, {**machine.fabric.model_dump(), "timeout_sec": exported}, "")
    except ConfigError:
        raise ConfigError(
            f"NCCL_TIMEOUT={exported} is not a time: it must be seconds, above 0 and at most {MAX_SEC}",
            cause="exported in the shell",
            fix="unset NCCL_TIMEOUT, and set fabric.timeout_sec in machine.yaml",
        ) from None
    if fabric.timeout_sec != own:
        say(f"keeping your exported NCCL_TIMEOUT={exported} (fabric.timeout_sec is {own:g})")
    return machine.model_copy(update={"fabric": fabric})


def has_rdma() -> bool:
    """Return whether this node has an active port of InfiniBand or RoCE."""
    # The second question because a container may hide /sys/class/infiniband.
    return bool(active_ports()) or infiniband_interface() is not None


def uses_rdma(fabric: Fabric) -> str:
    """Why NCCL uses InfiniBand or RoCE on this node; "" where it does not."""
    if fabric.infiniband == "never":
        return ""
    if ports := active_ports():
        more = f" and {len(ports) - 1} more" if len(ports) > 1 else ""
        return f"{ports[0]}{more}"
    if interface := infiniband_interface():
        return f"{interface} is InfiniBand"
    return "fabric.infiniband: always" if fabric.infiniband == "always" else ""


def choose_interface(
    fabric: Fabric, master: str, environ: Mapping[str, str] | None = None
) -> tuple[str | None, str]:
    """This node's interface for the ranks, and why: the interface that the user exported, else the
    loopback interface where they meet there, else the profile's, else InfiniBand with an address, else
    the route's. environ: of the ranks; None: that of this process."""
    if interface := _exported_interface(fabric, os.environ if environ is None else environ):
        return interface
    if rendezvous.is_loopback(master):
        return interface_towards(rendezvous.LOOPBACK), "all ranks are on this node"
    if named := fabric.interfaces.get(hostname()):
        return named, f"fabric.interfaces of {hostname()}"
    if fabric.interface:
        return fabric.interface, "fabric.interface"
    if fabric.infiniband != "never" and (infiniband := infiniband_interface()):
        return infiniband, "InfiniBand with an address"
    return interface_towards(master), f"routes to {master}"


def _exported_interface(fabric: Fabric, environ: Mapping[str, str]) -> tuple[str, str] | None:
    """The interface in GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME (of the backend first) or IB_IFNAME, and
    the variable's name. NCCL's `=` before one name stands for the whole name; its lists, prefixes and
    exclusions name none, and are left to NCCL."""
    names = ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]
    if fabric.backend == "nccl":
        names.reverse()
    for name in (*names, "IB_IFNAME"):
        value, is_of_nccl = environ.get(name, ""), name == "NCCL_SOCKET_IFNAME"
        if is_of_nccl:
            value = value.removeprefix("=")
        is_name = re.fullmatch(r"[\w.-]+", value)
        if is_name and (not is_of_nccl or value in psutil.net_if_addrs()):
            return value, f"your exported {name}"
    return None


def fits(pattern: str, names: Iterable[str]) -> bool:
    """Return whether NCCL finds one of these interfaces, or ports such as `mlx5_0:1`, by
    NCCL_SOCKET_IFNAME or NCCL_IB_HCA: prefixes separated by commas; `=` before them means whole names,
    `^` all others."""
    excludes = pattern.startswith("^")
    pattern = pattern.removeprefix("^")
    is_exact = pattern.startswith("=")
    wanted = [one.partition(":") for one in pattern.removeprefix("=").split(",") if one]

    if not wanted:  # as if it were not set
        return True

    def is_wanted(name: str) -> bool:
        device, _, port = name.partition(":")
        return any(
            (device == one if is_exact else device.startswith(one)) and number in ("", port)
            for one, _, number in wanted
        )

    return any(is_wanted(name) != excludes for name in names)


# Compute nodes have no internet access: a download would wait for minutes, then fail.
OFFLINE = [
    Setting(name, "1", "ranks never access the internet")
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
]

# 3: torch's watchdog ends the process without aborting NCCL's communicators, which may hang itself.
# It is torch's default, but torchrun sets 1 (abort, then end) where nothing is exported.
LOST_PEER = Setting(
    "TORCH_NCCL_ASYNC_ERROR_HANDLING", "3", "a rank whose peer is lost ends, and does not hang"
)

# Else a rank whose GPU hangs before a collective looks like those that wait for it: all hosts have
# enqueued the same collectives, and only the GPU knows which one it has started.
STARTED = Setting(
    "TORCH_NCCL_ENABLE_TIMING", "1", "tells which rank has not started a collective that hangs"
)

# Else a thread of torch that meets an error of the GPU ends the process before it has said why, above all
# while a save drains (torch 2.11: ProcessGroupNCCL.hpp).
RETHROW = Setting(
    "TORCH_NCCL_RETHROW_CUDA_ERRORS", "0", "a rank says itself which error of the GPU ends it"
)

# torch writes its flight recorder to this prefix and the rank's number; it records without being asked.
FLIGHT_RECORDER = "TORCH_FR_DUMP_TEMP_FILE"

DEBUG = [
    Setting("NCCL_DEBUG", "INFO", "fabric.debug"),
    Setting("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "fabric.debug"),
    Setting("PYTHONUNBUFFERED", "1", "fabric.debug"),
]


def cores_of_rank(ranks_per_node: int, cpus: int | None) -> int:
    """Number of cores for each rank on this node. cpus: that number from Slurm."""
    return cpus or max(1, available_cores() // ranks_per_node)


def available_cores() -> int:
    """Number of cores that this process may use; under Slurm fewer than the node has."""
    return len(os.sched_getaffinity(0))


def available_memory() -> int:
    """Bytes of memory available to this process: on the node, and within the limits of its cgroups."""
    left = int(psutil.virtual_memory().available)
    group = Path("/proc/self/cgroup")
    with contextlib.suppress(OSError, ValueError):
        # cgroup v2 has one line, "0::/path"; Slurm sets the job's limit on a parent of it.
        path = Path("/sys/fs/cgroup") / group.read_text().partition("0::/")[2].strip()
        for folder in (path, *path.parents):
            limit = folder / "memory.max"
            if limit.exists() and (most := limit.read_text().strip()) != "max":
                used = int((folder / "memory.current").read_text())
                left = min(left, int(most) - used + _file_cache(folder))
    return left


def _file_cache(cgroup: Path) -> int:
    """Bytes of the cgroup's page cache, which the kernel can reclaim. Reading shards and checkpoints
    fills it."""
    facts = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    return int(facts["active_file"]) + int(facts["inactive_file"])


DEVICES = Path("/dev")
MIG = "MIG-"  # how the name of a slice begins, in CUDA_VISIBLE_DEVICES and nvidia-smi


def count_gpus() -> int:
    """NVIDIA GPUs of this node by their device files, whether or not this process may use them. Where
    there are none, as in WSL, by NVML."""
    files = [path for path in DEVICES.glob("nvidia[0-9]*") if path.is_char_device()]
    return len(files) or _count_by_nvml()


def _count_by_nvml() -> int:
    try:
        import pynvml
    except ImportError:  # `make gpu` runs with the packages of the machine
        return 0
    try:
        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetCount())
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:  # no driver
        return 0


def usable_gpus() -> int:
    """GPUs that CUDA_VISIBLE_DEVICES shows to this process; MIG slices where it names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return count_gpus()
    shown = [name for name in visible.split(",") if name.strip() not in ("", "-1")]
    return len(shown) if mig_slices() else min(len(shown), count_gpus())


def mig_slices() -> list[str]:
    """MIG slices of GPUs that CUDA_VISIBLE_DEVICES names, as Slurm sets it; [] where it names GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return [name for name in visible.split(",") if name.startswith(MIG)]


def infiniband_interface() -> str | None:
    """The first InfiniBand interface that is up and has an IPv4 address."""
    up = psutil.net_if_stats()
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        # Type 32 is ARPHRD_INFINIBAND, <linux/if_arp.h>; a name such as ib0 is only a convention.
        kind = INTERFACES / name / "type"
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
            probe.connect(target)  # UDP: selects a route, sends nothing
            own_address = ipaddress.ip_address(probe.getsockname()[0])
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if (
                entry.family == family
                and ipaddress.ip_address(entry.address.partition("%")[0]) == own_address
            ):
                return name
    # Any address of 127.0.0.0/8 is the loopback interface, which lists one of them only.
    return "lo" if own_address.is_loopback and "lo" in psutil.net_if_addrs() else None


# --- ports of InfiniBand and RoCE -----------------------------------------------------------------


RDMA_DEVICES = Path("/sys/class/infiniband")
ACTIVE = "4: ACTIVE"  # ib_port_state, <rdma/ib_verbs.h>
NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"


@dataclass(frozen=True)
class Port:
    """An active port of an RDMA device."""

    device: str  # mlx5_0
    number: str
    link_layer: str  # InfiniBand, or Ethernet for RoCE
    rate: str  # 400 Gb/sec (4X NDR)
    gids: dict[int, str] = field(
        default_factory=dict
    )  # index -> type, such as RoCE v2; "" if unknown

    def __str__(self) -> str:
        kind = "RoCE" if self.is_roce else self.link_layer
        return f"{self.device} port {self.number} ({kind}, {self.rate})"

    @property
    def is_roce(self) -> bool:
        """Return whether NCCL reads NCCL_IB_GID_INDEX for this port. On InfiniBand it chooses the GID
        itself (ncclIbGetGidIndex), and such a port has GID 0 alone."""
        return self.link_layer == "Ethernet"


def active_ports() -> list[Port]:
    """The active ports of this node, by device; those that cannot be read are left out."""
    return list(_active(RDMA_DEVICES))


def _active(root: Path) -> Iterator[Port]:
    for folder in sorted(root.glob("*/ports/*")):
        try:
            if _line(folder / "state") == ACTIVE:
                yield Port(
                    device=folder.parent.parent.name,
                    number=folder.name,
                    link_layer=_line(folder / "link_layer"),
                    rate=_line(folder / "rate"),
                    gids=dict(_gids(folder)),
                )
        except OSError:
            continue


def _gids(folder: Path) -> Iterator[tuple[int, str]]:
    for path in sorted((folder / "gids").glob("*"), key=lambda path: int(path.name)):
        if _line(path) != NO_GID:
            try:
                kind = _line(folder / "gid_attrs/types" / path.name)
            except OSError:  # unknown to old kernels
                kind = ""
            yield int(path.name), kind


def _line(path: Path) -> str:
    return path.read_text().strip()


def rdma_bytes() -> tuple[int, int]:
    """Bytes that all ports have received and sent since they came up. The counters count four bytes as
    one (Linux, Documentation/ABI/stable/sysfs-class-infiniband)."""
    received, sent = (
        4 * sum(map(_count, RDMA_DEVICES.glob(f"*/ports/*/counters/port_{name}_data")))
        for name in ("rcv", "xmit")
    )
    return received, sent


def _count(path: Path) -> int:
    try:
        return int(_line(path))
    except (OSError, ValueError):
        return 0


def gid_trouble(port: Port, index: int) -> str:
    """Why NCCL_IB_GID_INDEX cannot be this index on this port; "" where it can, or is not read."""
    if not port.is_roce:
        return ""
    if index not in port.gids:
        there = ", ".join(f"{n} {kind}".strip() for n, kind in port.gids.items()) or "none"
        return f"{port} has no GID {index}; it has {there}"
    if port.gids[index] not in ("RoCE v2", ""):
        good = [str(n) for n, kind in port.gids.items() if kind == "RoCE v2"]
        return (
            f"GID {index} of {port} is of type {port.gids[index]}, which is not routed between networks;"
            f" those of RoCE v2 are {', '.join(good) or 'none'}"
        )
    return ""
