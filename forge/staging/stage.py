"""`forge stage`: copy token shards to the nodes' local disks, by content, verified, private."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from forge.cluster import slurm
from forge.cluster.placement import Geometry, find_place
from forge.core import event_log
from forge.core.config import ResolvedConfig
from forge.core.errors import DataError
from forge.core.files import disk_trouble
from forge.core.machine import Machine, Stage
from forge.core.paths import RunPaths, tokens_folder
from forge.core.process import hostname, node_local_folder
from forge.core.terminal import Progress, progress, say
from forge.data.shards import ShardSet
from forge.staging import on_node
from forge.staging.staged import StageRecord
from forge.staging.to_nodes import stage_nodes

COPY_THREADS = 4
COPY_BLOCK = 2**22
FICLONE = 0x40049409  # <linux/fs.h>


def stage(config: ResolvedConfig, machine: Machine, geometry: Geometry) -> Path:
    """Make the run's shards readable from fast storage on every node; the path of stage.json.

    A set that lies there with the right digests is kept. stage.json says which folder the ranks of
    each node read. Raises UnfitError for a folder that is full or that another user could tamper
    with, and for nodes that cannot be reached; DataError for damaged shards.
    """
    started = time.time()
    paths = RunPaths.of(config)
    source = ShardSet.open(tokens_folder(config.data, config.ids.tokens))
    place = find_place(machine, geometry)
    if place.is_here:
        record = _stage_here(source, config.run, machine.stage)
    else:
        record = stage_nodes(source, config, machine, place, min_nodes=geometry.nodes)
    seconds = round(time.time() - started, 3)
    facts = record.model_dump(mode="json", exclude={"format"})
    event_log.record(paths.events, "stage", seconds=seconds, **facts)
    record.write(paths)
    return paths.stage


# --- this host alone -------------------------------------------------------------------------------


def _stage_here(source: ShardSet, run: str, settings: Stage) -> StageRecord:
    root = on_node.private_root(Path(settings.folder or node_local_folder()))
    job = None if settings.keep else slurm.this_job_id()
    roots = {}
    if reason := _reason_to_stay(settings.mode, source.folder, root):
        source.verify()
        folder, skipped = source.folder, True
        say(f"stage: reading in place from {folder} ({reason})")
    else:
        if job:
            on_node.mark(root=str(root), job=job, run=run)
            roots = {hostname(): str(root)}
        folder = on_node.set_folder(root, source.digest, job)
        with _alone(root):
            skipped = _place(source, folder)
    return StageRecord(
        digest=source.digest,
        bytes=source.num_bytes,
        folders={hostname(): str(folder)},
        sent=[] if skipped else [hostname()],
        job=job,
        roots=roots,
    )


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Wait until no other run stages on this node: runs of a sweep do so at the same time.

    flock and not a lease: the kernel gives it back with a killed process, and the folder is this
    node's own.
    """
    with open(root / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _reason_to_stay(mode: str, source: Path, root: Path) -> str:
    """Why the shards are read where they are; "" to copy them."""
    if mode == "never":
        return "stage.mode is never"
    if mode == "auto" and source.stat().st_dev == root.stat().st_dev:
        return f"{root} is on the same file system"
    return ""


def _place(source: ShardSet, folder: Path) -> bool:
    """Put the set there; True when it was there already and every digest is right."""
    try:
        if on_node.is_whole(folder, source.digest):
            say(f"stage: {folder} is there already, digests are right")
            return True
    except DataError as err:
        say(f"stage: replacing a damaged copy: {err.what}")
    shutil.rmtree(folder, ignore_errors=True)
    for leftover in folder.parent.glob(".writing-*"):
        shutil.rmtree(leftover)
    on_node.require_space(folder.parent, source.num_bytes)
    temporary = folder.with_name(f".writing-{folder.name}")
    with disk_trouble(temporary), progress("stage", source.num_bytes / 2**20, "MiB") as report:
        temporary.mkdir(mode=0o700)
        _copy_all(source, temporary, report)
        shutil.copyfile(source.folder / "manifest.json", temporary / "manifest.json")
        copy = ShardSet.open(temporary)
        on_node.verify(copy)
        on_node.stamp(copy)
        temporary.rename(folder)
    say(f"stage: {source.num_bytes / 2**20:.1f} MiB in {folder}")
    return False


def _copy_all(source: ShardSet, target: Path, report: Progress) -> None:
    shards = source.train + source.val
    done = 0
    with ThreadPoolExecutor(COPY_THREADS) as pool:
        copies = pool.map(lambda shard: _copy(shard.path, target / shard.path.name), shards)
        for shard, _ in zip(shards, copies, strict=True):
            done += shard.num_bytes
            report(done / 2**20)


def _copy(source: Path, target: Path) -> None:
    """A reflink where the file system can (no bytes move), else a copy."""
    with open(source, "rb") as read, open(target, "xb") as write:
        try:
            fcntl.ioctl(write.fileno(), FICLONE, read.fileno())
        except OSError:
            shutil.copyfileobj(read, write, COPY_BLOCK)
