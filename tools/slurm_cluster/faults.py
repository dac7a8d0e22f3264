"""Faults of a single machine, and how to undo them. A reboot undoes everything as well."""

from __future__ import annotations

from pathlib import Path

from .machines import Machines

ROOT = Path("/")


class BreakableMachines(Machines):
    """Machines with bad cables, bad networks, full disks and missing mounts."""

    def cable_cut(self, name: str) -> None:
        """The node computes on, but nobody reaches it, and it reaches nobody."""
        self._in_rack("ip", "link", "set", name, "down")

    def cable_plug(self, name: str) -> None:
        """Others reach it again within 2 s, Slurm needs about 25 s to use it; a reboot is quicker."""
        self._in_rack("ip", "link", "set", name, "up")

    def slow_link(self, name: str, mbit: int) -> None:
        """Each direction of the node's cable carries at most `mbit` Mbit/s."""
        # A bucket for 10 ms, and for at least one packet as large as the kernel hands them down.
        bucket = max(mbit * 10_000 // 8, 65_536)
        self._shape(name, "rate", f"{mbit}mbit", "burst", str(bucket), "latency", "50ms")

    def small_mtu(self, name: str, mtu: int = 600) -> None:
        """Packets above `mtu` bytes vanish silently on the node's cable, in both directions."""
        # A token bucket drops each packet that is larger than the bucket.
        self._shape(name, "rate", "1gbit", "burst", str(mtu), "mtu", str(mtu), "limit", "1mb")

    def full_speed(self, name: str) -> None:
        """Undo slow_link and small_mtu."""
        self._shape(name)

    def block_pair(self, one: str, other: str) -> None:
        """Two machines do not reach each other, though both reach all others: packets vanish."""
        for source, target in ((one, other), (other, one)):
            # A hardware address that nobody has.
            nobody = ("lladdr", "02:00:00:00:00:00", "nud", "permanent")
            self._neighbour("replace", source, target, *nobody)

    def unblock_pair(self, one: str, other: str) -> None:
        for source, target in ((one, other), (other, one)):
            self._neighbour("delete", source, target)

    def hide(self, name: str, path: Path) -> None:
        """On this machine an empty folder lies over the path: as if it were not shared."""
        self.run("mount", "-t", "tmpfs", "hidden", path, machine=name, cwd=ROOT)

    def unhide(self, name: str, path: Path) -> None:
        self.run("umount", "--lazy", path, machine=name, cwd=ROOT)

    def fill_tmp(self, name: str, leave_mib: int) -> None:
        """Only `leave_mib` MiB are free in the machine's /tmp."""
        used = self.run("df", "-k", "--output=used", "/tmp", machine=name, cwd=ROOT).stdout.split()
        # A smaller disk is as good as a full one, and takes no memory.
        self._resize_tmp(name, int(used[1]) + leave_mib * 1024)

    def empty_tmp(self, name: str) -> None:
        """/tmp has its full size again; files in it stay."""
        self._resize_tmp(name, self.settings.tmp_mib * 1024)

    def interface(self, name: str) -> str:
        """The name of the machine's network interface, as it is now."""
        lines = self.run("ip", "-o", "-4", "address", machine=name, cwd=ROOT).stdout.splitlines()
        address = f" {self.settings.address(name)}/"
        return next(line.split()[1] for line in lines if address in line)

    def _resize_tmp(self, name: str, kib: int) -> None:
        options = f"remount,size={max(kib, 4)}k"  # 0 would mean: no limit
        self.run("mount", "-o", options, "/tmp", machine=name, cwd=ROOT)

    def _neighbour(self, action: str, source: str, target: str, *how: str) -> None:
        words = [action, self.settings.address(target), *how, "dev", self.interface(source)]
        self.run("ip", "neighbour", *words, machine=source, cwd=ROOT)

    def _shape(self, name: str, *bucket: str) -> None:
        """A token bucket at both ends of the cable; without arguments, none."""
        action, how = ("replace", ["root", "tbf", *bucket]) if bucket else ("delete", ["root"])
        self._in_rack("tc", "qdisc", action, "dev", name, *how)
        device = self.interface(name)
        self.run("tc", "qdisc", action, "dev", device, *how, machine=name, cwd=ROOT)
