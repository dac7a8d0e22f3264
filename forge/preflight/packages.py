"""Packages that a node must import (`preflight.packages`); what else must be alike on nodes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from forge.core.records import Check

# In a process of its own: another program may have another Python, and an import may crash.
IMPORT = """
import importlib, json, sys
versions = {}
for name in sys.argv[1:]:
    try:
        versions[name] = [str(getattr(importlib.import_module(name), "__version__", "")), ""]
    except BaseException as err:
        versions[name] = ["", f"{type(err).__name__}: {err}"]
print(json.dumps([sys.version.split()[0], versions]))
"""
# For the import of torch alone: a CUDA build has gigabytes of libraries, which a network disk may give to
# all nodes at once.
TORCH_SEC = 300.0
# Libraries that come with a CUDA build of torch, under the names of its packages.
CUDA = ("nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime")
# Those that have the version of CUDA itself.
RUNTIME = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12")
# CUDA's major version -> the oldest driver for all of its minor versions (NVIDIA, "CUDA Compatibility",
# minor-version-compatibility.html, table 1).
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
COMPARED = re.compile(r"(NCCL|GLOO|TORCH|PYTORCH)_\w+")
DRIVER = Path("/sys/module/nvidia/version")


@dataclass(frozen=True)
class Imported:
    """The check `imports` of a node, and the versions by name."""

    check: Check
    versions: dict[str, str]


def import_packages(*, names: Sequence[str], command: str, cwd: str, sec: float) -> Imported:
    """Import each package on this node.

    command: first word of another program's command; its Python is asked where it is one, else this one.
    cwd: the directory that the ranks run in.
    """
    python = (shutil.which(command) if is_python(command) else None) or sys.executable
    try:
        done = subprocess.run(
            [python, "-c", IMPORT, *names],
            cwd=cwd,
            check=False,
            capture_output=True,
            text=True,
            timeout=sec,
        )
        number, imported = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        message = f"importing {', '.join(names)} takes longer than {sec:.0f} s"
        fix = "raise preflight.deadline_sec, or copy the environment to the nodes (stage.project)"
        return _failed(message, fix, "the file system of the packages is slow on this node")
    except (OSError, IndexError, ValueError) as err:
        trouble = done.stderr.strip()[-200:] if isinstance(err, IndexError) else str(err)
        return _failed(f"{python} imports nothing: {trouble}", f"try it there: {python} -V")
    missing = [f"{name} ({trouble})" for name, (_, trouble) in imported.items() if trouble]
    if missing:
        fix = f"install them for {python}, or correct preflight.packages"
        return _failed(f"cannot import {', '.join(missing)}", fix)
    versions = {name: text for name, (text, _) in imported.items()}
    said = ", ".join(f"{name} {text}".strip() for name, text in versions.items())
    return Imported(Check("imports", "ok", f"Python {number}, {said}"), versions)


def is_python(command: str) -> bool:
    return bool(re.fullmatch(r"python[\d.]*", Path(command).name))


def _failed(message: str, fix: str, cause: str = "") -> Imported:
    return Imported(Check("imports", "fail", message, fix, cause), {})


def import_torch(*, sec: float = TORCH_SEC) -> Check:
    """Import torch on this node with this Python, as one process, so that its ranks find the files in the
    page cache when their clock runs."""
    started = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-c", "import torch.distributed"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        try:
            status = process.wait(sec)
        except subprocess.TimeoutExpired:
            process.kill()  # without a wait: it may be in the kernel, for the disk
            return Check(
                "torch",
                "fail",
                f"importing torch takes longer than {sec:.3g} s",
                "copy the environment to the nodes (stage.project: true), or put it on a faster disk",
                f"the disk that holds {sys.prefix} is slow on this node, or does not respond",
            )
        output.seek(0)
        lines = output.read().decode(errors="replace").strip().splitlines()
    if status:
        message = f"cannot import torch: {lines[-1][:300] if lines else f'exit status {status}'}"
        return Check("torch", "fail", message, f"try it there: {sys.executable} -c 'import torch'")
    return Check("torch", "ok", f"imported in {time.monotonic() - started:.1f} s")


def cuda_versions() -> dict[str, str]:
    """Versions of the libraries of CUDA that are installed as packages."""
    versions = {}
    for name in CUDA:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def cuda_of_torch() -> str:
    """The CUDA that torch was built for, such as `13.0`; `cpu` for none, "" where no package tells it."""
    with suppress(PackageNotFoundError):
        _, _, label = version("torch").partition("+")
        if build := re.fullmatch(r"cu(\d\d)(\d)", label):
            return f"{build[1]}.{build[2]}"
        if label == "cpu":
            return label
    versions = cuda_versions()
    return next((versions[name] for name in RUNTIME if name in versions), "")


def oldest_driver(cuda: str) -> int:
    """Major version of the oldest NVIDIA driver that runs this CUDA; 0 for one that is not known."""
    major = cuda.partition(".")[0]
    return OLDEST_DRIVER.get(int(major), 0) if major.isdecimal() else 0


def has_own_libcuda() -> bool:
    """Return whether this process loads CUDA's library of the forward compatibility package, which runs
    with an older driver."""
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    return any(folder and Path(folder, "libcuda.so.1").exists() for folder in folders)


def driver_version() -> str:
    """Version of NVIDIA's driver; "" without one."""
    return DRIVER.read_text().strip() if DRIVER.exists() else ""


def exported() -> dict[str, str]:
    """Variables for NCCL, Gloo and torch that this process inherited."""
    return {name: value for name, value in os.environ.items() if COMPARED.fullmatch(name)}
