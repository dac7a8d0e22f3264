"""The verb `stage`: token shards onto a node's own fast disk, by content, checked, private."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from forge import ledger
from forge.artefacts import freeze
from forge.config import Config
from forge.errors import DataError, UnfitError
from forge.launch import hostname, node_local_folder
from forge.machine import Machine
from forge.manifest import disk_trouble, write_json
from forge.paths import RunPaths, tokens_folder
from forge.progress import Progress, progress, say
from forge.shards import ShardSet

COPY_THREADS = 4
COPY_BLOCK = 2**22
FICLONE = 0x40049409  # <linux/fs.h>
SPARE_BYTES = 256 * 2**20  # left free for others on the node


def stage(config: Config, machine: Machine) -> Path:
    """Make the run's shards readable from fast storage; the path of stage.json, which says where.

    A set that lies there with the right digests is kept. Raises UnfitError for a folder that is
    full or that another user could tamper with, DataError for damaged shards.
    """
    started = time.time()
    config = freeze(config)
    assert config.ids
    paths = RunPaths.of(config)
    source = ShardSet.open(tokens_folder(config.data, config.ids.tokens))
    root = _private(Path(machine.stage.folder or node_local_folder()))
    if reason := _reason_to_stay(machine.stage.mode, source.folder, root):
        source.verify()
        folder, skipped = source.folder, True
        say(f"stage: reading in place from {folder} ({reason})")
    else:
        folder = root / source.digest[:32]
        with _alone(root):
            skipped = _place(source, folder)
    seconds = round(time.time() - started, 3)
    facts = {"bytes": source.num_bytes, "digest": source.digest, "skipped": skipped}
    ledger.record(paths.events, "stage", seconds=seconds, path=str(folder), **facts)
    write_json(paths.stage, {"folder": str(folder), "host": hostname(), **facts})
    return paths.stage


def _private(base: Path) -> Path:
    """The user's own folder below a shared /tmp, mode 0700. UnfitError if somebody else made it."""
    root = base / f"forge-{os.getuid()}"
    with disk_trouble(root):
        base.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            root.mkdir(mode=0o700)
        found = os.lstat(root)  # not stat: a planted link must not be followed
    wrong = (
        "is not a folder (a planted link?)"
        if not stat.S_ISDIR(found.st_mode)
        else f"belongs to user {found.st_uid}"
        if found.st_uid != os.getuid()
        else f"has mode {stat.S_IMODE(found.st_mode):o}, which lets others in"
        if stat.S_IMODE(found.st_mode) & 0o077
        else ""
    )
    if wrong:
        raise UnfitError(
            f"{root} {wrong}",
            cause="another user of this node made it, or it was changed by hand",
            fix="set stage.folder in machine.yaml to a folder of your own, or remove it",
        )
    return root


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
    if folder.exists():
        try:
            there = ShardSet.open(folder)
            there.verify()
            if there.digest == source.digest:
                say(f"stage: {folder} is there already, digests are right")
                return True
        except DataError as err:
            say(f"stage: replacing a damaged copy: {err.what}")
        shutil.rmtree(folder)
    for leftover in folder.parent.glob(".writing-*"):
        shutil.rmtree(leftover)
    _require_space(folder.parent, source.num_bytes)
    temporary = folder.with_name(f".writing-{folder.name}")
    with disk_trouble(temporary), progress("stage", source.num_bytes / 2**20, "MiB") as report:
        temporary.mkdir(mode=0o700)
        _copy_all(source, temporary, report)
        shutil.copyfile(source.folder / "manifest.json", temporary / "manifest.json")
        ShardSet.open(temporary).verify()
        temporary.rename(folder)
    say(f"stage: {source.num_bytes / 2**20:.1f} MiB in {folder}")
    return False


def _require_space(root: Path, needed: int) -> None:
    free = shutil.disk_usage(root).free
    if free < needed + SPARE_BYTES:
        raise UnfitError(
            f"{root} has {free / 2**30:.1f} GiB free, the shards need {needed / 2**30:.1f} GiB"
            f" and {SPARE_BYTES // 2**20} MiB stay free",
            cause="other jobs or older staged sets fill this disk",
            fix=f"remove old sets in {root}, choose another stage.folder, or set stage.mode to never",
        )


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
