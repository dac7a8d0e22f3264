"""Where torch keeps the kernels that it compiles for a run, so that they survive a requeue."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

from forge.cluster.network import Setting
from forge.core.files import private_root
from forge.core.process import node_local_folder
from forge.core.provenance import cpu_id
from forge.core.terminal import say
from forge.launch.rank_records import LaunchSpec

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"  # of torch._inductor; Triton's kernels go below it, too


def kernel_cache(spec: LaunchSpec) -> Setting:
    """The directory for kernels of this launch, as a variable for torch.

    Each user and each kind of CPU has its own, also on the node's own disk, which $TMPDIR may have led
    to a shared one: torch compiles for the CPU that it runs on (-march=native), and the names of its
    files do not tell which.
    """
    if spec.kernels:
        folder = Path(spec.kernels) / f"{os.getuid()}-{cpu_id()}"
        return Setting(VARIABLE, str(folder), "compiled kernels survive a requeue")
    return Setting(VARIABLE, str(_of_node()), "compiled kernels, of this node")


def open_kernel_cache() -> None:
    """Check the directory before torch compiles; where this node cannot write or lock files there, take
    one on its own disk. UnfitError where another user made that."""
    folder = Path(os.environ.setdefault(VARIABLE, str(_of_node())))
    if folder != _of_node() and (trouble := _trouble(folder)):
        say(f"warning: compiled kernels are kept in {_of_node()}, since {trouble}")
        folder = _of_node()
        os.environ[VARIABLE] = str(folder)
    if folder == _of_node():
        private_root(node_local_folder())


def _of_node() -> Path:
    """Below a directory that only this user can change: kernels are executed. torch's own default is a
    name in /tmp that anybody can guess, and make before."""
    return node_local_folder() / f"forge-{os.getuid()}" / "kernels" / cpu_id()


def _trouble(folder: Path) -> str:
    """Why torch cannot use the directory on this node; "" where it can. It locks files there while it
    compiles for a CPU, and some network file systems have no locks."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as err:
        return f"{folder} cannot be used on this node: {err.strerror or err}"
    return ""
