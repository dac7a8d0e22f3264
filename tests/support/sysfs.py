"""Nodes as their kernels list them: trees like /sys/class/infiniband and /sys/class/net, and addresses.

The form is that of Linux (Documentation/ABI/stable/sysfs-class-infiniband, and core/sysfs.c there): a
port has all entries of its GID table, empty ones as zeros; the type of an empty entry cannot be read.
InfiniBand: one GID, of the type "IB/RoCE v1". RoCE: for each address of its interface one GID as RoCE v1
and one as v2, link-local first (NVIDIA MLNX_OFED, "RDMA over Converged Ethernet"). The interfaces of the
H100 nodes are those of the Kempner Computing Handbook: ib0 to ib3, an address on ib0 alone, management on
em4. The numbers in GIDs and addresses are made up.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import psutil

from forge.hosts import network

NDR = "400 Gb/sec (4X NDR)"
ETHERNET, INFINIBAND = 1, 32  # <linux/if_arp.h>
LINK_LOCAL = "fe80:0000:0000:0000:a288:c2ff:fe3d:{:04x}"
MAPPED = "0000:0000:0000:0000:0000:ffff:0a01:00{:02x}"  # 10.1.0.N
V1, V2 = "IB/RoCE v1", "RoCE v2"
TABLE = 8  # entries of a GID table that are written; a real one has 128 or 256


@dataclass
class Device:
    """An RDMA device with one port."""

    layer: str
    gids: dict[int, tuple[str, str]]  # index -> GID and its type
    state: str = "4: ACTIVE"
    rate: str = NDR


@dataclass
class Node:
    """A node's RDMA devices, and its network interfaces: type, and address if any."""

    devices: dict[str, Device] = field(default_factory=dict)
    interfaces: dict[str, tuple[int, str]] = field(default_factory=dict)

    def install(self, root: Path, monkeypatch) -> None:
        """Write the trees below `root`, and let Forge read them in place of this machine's."""
        for name, device in self.devices.items():
            _write_port(root / "infiniband" / name / "ports/1", device)
        for name, (kind, _) in self.interfaces.items():
            _write(root / "net" / name / "type", str(kind))
        addresses = {
            name: [SimpleNamespace(family=socket.AF_INET, address=at)] if at else []
            for name, (_, at) in self.interfaces.items()
        }
        up = {name: SimpleNamespace(isup=True) for name in self.interfaces}
        monkeypatch.setattr(network, "RDMA_DEVICES", root / "infiniband")
        monkeypatch.setattr(network, "INTERFACES", root / "net")
        monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
        monkeypatch.setattr(psutil, "net_if_stats", lambda: up)


def _write_port(port: Path, device: Device) -> None:
    for name, text in (
        ("state", device.state),
        ("link_layer", device.layer),
        ("rate", device.rate),
    ):
        _write(port / name, text)
    for index in range(TABLE):
        gid, kind = device.gids.get(index, (network.NO_GID, ""))
        _write(port / "gids" / str(index), gid)
        if kind:
            _write(port / "gid_attrs/types" / str(index), kind)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def infiniband(number: int) -> Device:
    return Device("InfiniBand", {0: (LINK_LOCAL.format(number), V1)})


def roce(number: int, *, with_address: bool = True) -> Device:
    """with_address: of IPv4, which gives entries 2 and 3."""
    gids = {0: (LINK_LOCAL.format(number), V1), 1: (LINK_LOCAL.format(number), V2)}
    if with_address:
        gids |= {2: (MAPPED.format(number), V1), 3: (MAPPED.format(number), V2)}
    return Device("Ethernet", gids, rate="100 Gb/sec (2X HDR)")


def _four(device) -> dict[str, Device]:
    return {f"mlx5_{number}": device(number) for number in range(4)}


_MANAGEMENT = {"lo": (772, "127.0.0.1"), "em4": (ETHERNET, "10.31.0.7")}

H100_WITH_IPOIB = Node(
    _four(infiniband),
    {
        **_MANAGEMENT,
        **{f"ib{n}": (INFINIBAND, "10.32.0.7" if n == 0 else "") for n in range(4)},
    },
)
H100_WITHOUT_IPOIB = Node(_four(infiniband), _MANAGEMENT)
ROCE = Node(
    _four(roce),
    {**_MANAGEMENT, **{f"ens{n}np0": (ETHERNET, f"10.1.0.{n}") for n in range(4)}},
)
ROCE_WITHOUT_ADDRESS = Node(
    {**_four(roce), "mlx5_3": roce(3, with_address=False)},
    {**_MANAGEMENT, **{f"ens{n}np0": (ETHERNET, "") for n in range(4)}},
)
ETHERNET_ONLY = Node(interfaces={"lo": (772, "127.0.0.1"), "eno1": (ETHERNET, "10.31.0.9")})
