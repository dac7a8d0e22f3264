"""Provenance of a model, recorded in each checkpoint: code, config, data, versions and hardware."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import forge
from forge.core.config import FOLDERS, ResolvedConfig
from forge.core.files import canonical, digest_bytes

PACKAGES = ("torch", "tokenizers", "numpy", "snakemake", "pydantic", "blake3")


def config_digest(config: ResolvedConfig) -> str:
    """Digest of the science of a run: its config without the names of folders."""
    science = {k: v for k, v in config.to_json().items() if k not in FOLDERS}
    return digest_bytes(canonical(science))


def versions() -> dict[str, str]:
    """Versions of Python and of what decides the numbers."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def code() -> dict[str, Any]:
    """Version and, from a git checkout, commit and whether files differ from it."""
    folder = Path(forge.__file__).parent
    commit = _git(folder, "rev-parse", "HEAD")
    dirty = bool(_git(folder, "status", "--porcelain", "--untracked-files=no")) if commit else None
    return {"version": forge.__version__, "commit": commit, "dirty": dirty}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            check=False,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None  # no git here, or its file system hangs: the version still says something
    return done.stdout.strip() if done.returncode == 0 else None


def cpu_name() -> str:
    """The processor's model as the kernel names it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
