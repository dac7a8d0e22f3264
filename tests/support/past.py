"""Unpack what the product of an earlier commit left on disk (tests/past), for the product of today."""

from __future__ import annotations

import io
import json
import lzma
import platform
import shutil
import tarfile
import warnings
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from blake3 import blake3
from support.clone import REPOSITORY, Project

FIXTURES = REPOSITORY / "tests/past"
# Of each loss, in nats per token, where another CPU or torch gives other bits: that of forge reproduce.
# Without vector instructions (ATEN_CPU_CAPABILITY=default) they differed by 2e-6.
LOSS_TOLERANCE = 1e-3
# Instructions by which MKL and oneDNN choose kernels, beside those that torch itself names.
VECTORS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "bf16", "sve")


def commits() -> list[str]:
    """Those that have a fixture."""
    found = sorted(path.stem for path in FIXTURES.glob("*.json"))
    assert found, f"no fixture in {FIXTURES}: pytest would skip all of its tests"
    return found


@dataclass(frozen=True)
class Past:
    """The fixture of one commit, unpacked; tests work on copies."""

    archive: Path
    folder: Path
    recorded: dict[str, Any]

    @classmethod
    def unpack(cls, commit: str, folder: Path, fixtures: Path = FIXTURES) -> Past:
        """ValueError where the archive is not the recorded one."""
        recorded = json.loads((fixtures / f"{commit}.json").read_text())
        archive = fixtures / f"{commit}.tar.xz"
        data = archive.read_bytes()
        if blake3(data).hexdigest() != recorded["archive"]:
            raise ValueError(f"{archive.name} is not the archive whose digest {commit}.json has")
        with tarfile.open(fileobj=io.BytesIO(lzma.decompress(data))) as tar:
            # Python 3.11.2, that of Debian 12, has no filters; the digest has told what is inside.
            tar.extractall(folder, **{"filter": "tar"} if hasattr(tarfile, "tar_filter") else {})
        return cls(archive, folder, recorded)

    @property
    def verify_alone(self) -> Path:
        """The verify.py that was handed on then."""
        return self.folder / "verify.py"

    def project(self, name: str, to: Path) -> Project:
        """A copy, with its times and links, under the workflow of today."""
        shutil.copytree(self.folder / name, to, symlinks=True)
        shutil.copytree(REPOSITORY / "workflow", to / "workflow")
        (to / "tmp").mkdir()
        return Project(to)


def bits_of_this_machine() -> dict[str, Any]:
    """What decides the last bits of a training on CPUs."""
    import torch  # takes seconds

    return {
        "torch": version("torch"),
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "vendor": _of_cpu("vendor_id"),
        "vectors": [name for name in VECTORS if name in _of_cpu("flags", "Features").split()],
        "threads_per_rank": 1,
    }


def _of_cpu(*names: str) -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in pairs if key.strip() in names), "")


def compares_bits(recorded: dict[str, Any]) -> bool:
    """Whether this machine must give the recorded bits; a warning says where only losses are compared."""
    here, then = bits_of_this_machine(), recorded["bits"]
    others = {name: (then[name], here[name]) for name in here if here[name] != then[name]}
    if others:
        said = ", ".join(f"{name} was {a}, is {b}" for name, (a, b) in others.items())
        warnings.warn(
            f"losses within {LOSS_TOLERANCE} are compared, no digests: {said}", stacklevel=2
        )
    else:
        print("digests are compared: this machine must give the recorded bits")
    return not others


def digest(path: Path) -> str:
    return blake3(path.read_bytes()).hexdigest()


def flip_a_bit(path: Path, at: int = -20) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
