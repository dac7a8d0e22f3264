"""Directory of the kernels that torch compiles for a run, kept so that they survive a requeue."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from pathlib import Path

from forge.core.files import private_root
from forge.core.process import node_local_folder
from forge.core.provenance import cpu_id
from forge.core.terminal import say
from forge.hosts.network import Setting
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


def is_default(folder: str) -> bool:
    """Return whether a value of the variable is torch's default or Forge's on this node, and so no choice
    of the user: importing torch's compiler sets the variable for all that the process starts."""
    path = Path(folder)
    in_tmp = str(path.parent) in ("/tmp", tempfile.gettempdir())
    of_torch = in_tmp and path.name.startswith("torchinductor_")
    return of_torch or folder == str(_of_node())


def forget_default() -> None:
    """Remove the variable from the environment where it is no choice of the user."""
    if is_default(os.environ.get(VARIABLE, "")):
        del os.environ[VARIABLE]


def open_kernel_cache() -> Path:
    """Check the directory before torch compiles, and return it; where this node cannot write or lock
    files there, or others can change them, take one on its own disk. UnfitError where another user made
    that."""
    forget_default()
    folder = Path(os.environ.setdefault(VARIABLE, str(_of_node())))
    if folder != _of_node() and (trouble := _trouble(folder)):
        say(f"warning: compiled kernels are kept in {_of_node()}, since {trouble}")
        folder = _of_node()
        os.environ[VARIABLE] = str(folder)
    if folder == _of_node():
        private_root(node_local_folder())
    return folder


def _of_node() -> Path:
    """Below a directory that only this user can change: kernels are executed. torch's own default is a
    name in /tmp that anybody can guess, and make before."""
    return node_local_folder() / f"forge-{os.getuid()}" / "kernels" / cpu_id()


def _trouble(folder: Path) -> str:
    """Why torch cannot use the directory on this node; "" where it can. It locks files there while it
    compiles for a CPU, and some network file systems have no locks. It executes what is there."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.stat()
        if status.st_uid != os.getuid():
            return f"{folder} belongs to user {status.st_uid}"
        if stat.S_IMODE(status.st_mode) & 0o022:
            return f"others can write to {folder} (mode {stat.S_IMODE(status.st_mode):o})"
        with tempfile.TemporaryFile(dir=folder) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as err:
        return f"{folder} cannot be used on this node: {err.strerror or err}"
    return ""
