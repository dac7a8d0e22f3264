"""RDMA ports of this node, InfiniBand and RoCE, as the kernel lists them in /sys/class/infiniband.

An InfiniBand port needs no IP address for NCCL, and a RoCE port has an ordinary Ethernet interface: so
network interfaces do not tell whether there is RDMA.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

SYS = Path("/sys/class/infiniband")
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
        """Whether NCCL reads NCCL_IB_GID_INDEX for this port. On InfiniBand it chooses the GID itself
        (ncclIbGetGidIndex), and such a port has GID 0 alone."""
        return self.link_layer == "Ethernet"


def active_ports() -> list[Port]:
    """The active ports of this node, by device; those that cannot be read are left out."""
    return list(_active(SYS))


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
