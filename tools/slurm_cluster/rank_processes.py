"""The living rank processes of a run, on all machines of this host."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil


def rank_processes(launches: Path) -> list[psutil.Process]:
    """Processes of the ranks of all launches whose directories are in `launches` (RunPaths.launches)."""
    found = []
    psutil.process_iter.cache_clear()  # a pid may be another process than at the last call
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess):
            # Not srun and torchrun, which have the same words behind others.
            line = [word for word in process.cmdline()[1:] if word != "-u"]
            mine = line[:2] == ["-m", "forge.worker"] and Path(
                process.cwd(), line[2]
            ).is_relative_to(launches)
            if mine and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
