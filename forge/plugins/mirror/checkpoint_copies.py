"""The checkpoint to resume from, on the disks of nodes that do not see it (`stage.results: first_node`).

Sent by sbcast before a launch and verified by digest on each node; the launch then moves it to where its
ranks look for checkpoints.
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from forge.core.errors import DataError, UnfitError
from forge.core.file_list import FileEntry, FileList
from forge.core.files import disk_trouble, private_root, relative_path
from forge.core.machine import Machine
from forge.core.process import hostname, node_local_folder
from forge.core.terminal import say
from forge.hosts.nodes import NodeFailure, NodePool, failed_on
from forge.hosts.placement import Placement
from forge.staging.on_node import SPARE_BYTES
from forge.staging.sbcast import Broadcast, SbcastFailed
from forge.staging.to_nodes import ASK_SEC, MIN_DISK_BYTES_PER_SEC

INCOMING = "checkpoint"  # in the job's directory on a node


def send_checkpoint(files: FileList, machine: Machine, placement: Placement, python: str) -> str:
    """Copy a checkpoint to every node of the placement but this one; the path of the copies.

    files: all of it, by their paths below its directory. python: of the agents. Raises NodesFailed for
    nodes that cannot take it.
    """
    others = placement.without([hostname()])
    assert placement.job
    sizes = {name: entry.size or 0 for name, entry in files.entries.items()}
    keys: dict[str, Any] = {
        "base": machine.stage.folder,
        "job": placement.job.id,
        "name": files.folder.name,
    }
    with NodePool(others, python=python) as pool:

        def ask(call: Callable[..., str], action: str, **arguments: Any) -> str:
            sec = ASK_SEC + sum(sizes.values()) / MIN_DISK_BYTES_PER_SEC
            answers = pool.ask(call, timeout_sec=sec, **keys, **arguments)
            failures = {h: a for h, a in answers.items() if isinstance(a, NodeFailure)}
            if failures:
                raise failed_on(failures, action)
            return str(next(iter(answers.values())))

        folder = ask(begin_checkpoint, "making room for the checkpoint", sizes=sizes)
        try:
            _send(files, folder, placement.job.id, others.hosts)
        except SbcastFailed as broken:
            raise failed_on(broken.failures, "sending the checkpoint") from None
        entries = {name: entry.digest for name, entry in files.entries.items()}
        copy = ask(verify_checkpoint, "verifying the checkpoint", sizes=sizes, digests=entries)
    num_bytes = sum(sizes.values())
    where = ", ".join(others.hosts)
    say(f"{files.folder.name} ({num_bytes / 2**20:.1f} MiB) on {where}, digests are right")
    return copy


def _send(files: FileList, folder: str, job_id: str, hosts: Sequence[str]) -> None:
    """sbcast of each file into the directory of its name; those without content are made there."""
    by_folder: dict[str, list[Path]] = defaultdict(list)
    for name, entry in files.entries.items():
        if entry.size:
            path = files.folder / name if name else files.folder
            by_folder[str(Path(folder, name).parent) if name else folder].append(path)
    with Broadcast(job_id, hosts) as broadcast:
        for target, paths in by_folder.items():
            for _ in broadcast.send(paths, target):
                pass


# --- calls to the nodes ---------------------------------------------------------------------------


def _incoming(base: str | None, job: str) -> Path:
    return private_root(Path(base or node_local_folder())) / f"job-{job}" / INCOMING


def begin_checkpoint(*, base: str | None, job: str, name: str, sizes: dict[str, int]) -> str:
    """Make empty directories for the files of a checkpoint; the path in which they arrive. sizes: of the
    files, by name; "" for a checkpoint that is a file. UnfitError where the disk has no room."""
    incoming = _incoming(base, job)
    shutil.rmtree(incoming, ignore_errors=True)
    folder = incoming if "" in sizes else incoming / relative_path(name)
    with disk_trouble(folder):
        folder.mkdir(parents=True, mode=0o700)
        _require_room(incoming, sum(sizes.values()))
        for file, size in sizes.items():
            if file:
                path = folder / relative_path(file)
                path.parent.mkdir(parents=True, exist_ok=True)
                if not size:
                    path.touch()
    return str(folder)


def _require_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed + SPARE_BYTES:
        raise UnfitError(
            f"{folder} has {free / 2**30:.2f} GiB free, the checkpoint needs {needed / 2**30:.2f} GiB",
            cause="other jobs or older staged sets fill this disk",
            fix="free space there, or choose another stage.folder",
        )


def verify_checkpoint(
    *, base: str | None, job: str, name: str, sizes: dict[str, int], digests: dict[str, str]
) -> str:
    """Verify all files of a checkpoint that has arrived; its path. Raises DataError."""
    path = _incoming(base, job) / relative_path(name)
    entries = {file: FileEntry(sizes[file], digest) for file, digest in digests.items()}
    if bad := list(FileList(path, entries, listed_in="the first node").bad_files()):
        raise DataError(
            f"{path}: {'; '.join(bad)}",
            cause="damaged on its way, or on this disk",
            fix="rerun the same command",
        )
    return os.fspath(path)


CALLS: tuple[Callable[..., Any], ...] = (begin_checkpoint, verify_checkpoint)
