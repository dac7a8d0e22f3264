"""The part of `forge stage` that runs on one node: inspect, copy or unpack, verify, keep, remove.

Everything is in a private directory, `forge-{uid}`:

- `{digest}`: shards that were kept (`stage.keep`), or that no Slurm job will remove
- `job-{id}/{digest}`: shards that are removed with their job; `job-{id}/used-by-{run}` names each
  reader
- `job-{id}/writing-…`, and `.writing-{digest}` beside where a set goes: a copy that is not complete
  yet, sent by another host or made by this one
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
import stat
import tarfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from forge.cluster.network import interface_towards
from forge.core.errors import DataError, UnfitError
from forge.core.files import disk_trouble, read_json, write_json
from forge.core.process import node_local_folder
from forge.core.terminal import progress
from forge.data.shards import MANIFEST, Shard, ShardSet

SPARE_BYTES = 256 * 2**20  # left free for others on the node
STAMP = ".stamp.json"
PARTS = "parts"  # of a pack, in the folder that they are unpacked into
VERIFY_THREADS = 4
COPY_THREADS = 4
COPY_BLOCK = 2**22
FICLONE = 0x40049409  # <linux/fs.h>

# A shared file system is read in place if it gives a node this much. A rank reads one window of
# some KiB for each sample, in random order: 1000 a second serve four fast GPUs five times over.
# All bytes are read once at the start, to check their digests: 200 s for 100 GiB at this rate.
MIN_READS_PER_SEC = 1000
MIN_MIB_PER_SEC = 500
SAMPLE_READS, SAMPLE_READ_BYTES = 64, 2**14
SAMPLE_BYTES = 64 * 2**20


# --- folders -------------------------------------------------------------------------------------


def private_root(base: Path) -> Path:
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


def set_folder(root: Path, digest: str, job: str | None) -> Path:
    """Where a set lies; job: the Slurm job that it goes away with, None for one that stays."""
    return (root / f"job-{job}" if job else root) / digest[:32]


# --- is it there? --------------------------------------------------------------------------------


def is_whole(folder: Path, digest: str) -> bool:
    """Whether this set is there, byte for byte. Raises DataError that says how it is damaged.

    Files that nobody has touched since their digests were checked, in the same boot, are not read
    again: the kernel sets ctime at every change. Ranks check every byte once more when they start.
    """
    if not folder.exists():
        return False
    there = ShardSet.open(folder)
    if there.digest != digest:
        return False
    if not _is_stamped(there):
        verify(there)
        stamp(there)
    return True


def verify(shards: ShardSet) -> None:
    """All digests, on a few cores. Raises DataError."""
    with ThreadPoolExecutor(VERIFY_THREADS) as pool:
        shares = [(index, VERIFY_THREADS) for index in range(VERIFY_THREADS)]
        list(pool.map(shards.verify, shares))


def stamp(shards: ShardSet) -> None:
    """Note that all digests are right now."""
    write_json(shards.folder / STAMP, _state(shards))


def _is_stamped(shards: ShardSet) -> bool:
    path = shards.folder / STAMP
    return path.exists() and read_json(path) == _state(shards)


def _state(shards: ShardSet) -> dict[str, Any]:
    files = [*(shard.path for shard in shards.train + shards.val), shards.folder / MANIFEST]
    found = {path.name: path.stat() for path in files}
    return {
        "digest": shards.digest,
        # After a power cut a file may be as long as before, with zeros in it.
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "files": {n: [s.st_size, s.st_ino, s.st_mtime_ns, s.st_ctime_ns] for n, s in found.items()},
    }


# --- is the shared file system good enough? -------------------------------------------------------


def shared_verdict(shared: Path, digest: str, root: Path, mode: str) -> tuple[bool, str]:
    """Whether to read the set where it is shared, and what decided it."""
    if mode == "always":
        return False, "stage.mode is always"
    try:
        shards = ShardSet.open(shared)
    except (DataError, OSError) as err:
        return False, f"does not show the shards ({err})"
    if shards.digest != digest:
        return False, f"{shared} has another digest here"
    if mode == "never":
        return True, "stage.mode is never"
    if shared.stat().st_dev == root.stat().st_dev:
        return True, f"{root} is on the same file system"
    reads, rate = _measure(shards)
    enough = reads >= MIN_READS_PER_SEC and rate >= MIN_MIB_PER_SEC
    return enough, (
        f"the shared file system gives {reads:.0f} random reads/s and {rate:.0f} MiB/s,"
        f" {MIN_READS_PER_SEC} and {MIN_MIB_PER_SEC} are enough"
    )


def _measure(shards: ShardSet) -> tuple[float, float]:
    """Random reads a second, and MiB a second in sequence, past this node's page cache."""
    everything = shards.train + shards.val
    rng = random.Random(0)
    offsets = [_random_place(everything, rng) for _ in range(SAMPLE_READS)]
    reads = SAMPLE_READS / _seconds([(s.path, at, SAMPLE_READ_BYTES) for s, at in offsets])
    largest = max(everything, key=lambda shard: shard.num_bytes)
    length = min(largest.num_bytes, SAMPLE_BYTES)
    return reads, length / 2**20 / _seconds([(largest.path, 0, length)])


def _random_place(shards: list[Shard], rng: random.Random) -> tuple[Shard, int]:
    shard = rng.choice(shards)
    return shard, rng.randrange(max(1, shard.num_bytes - SAMPLE_READ_BYTES))


def _seconds(reads: list[tuple[Path, int, int]]) -> float:
    seconds = 0.0
    for path, offset, length in reads:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)
            started = time.perf_counter()
            os.pread(fd, length, offset)
            seconds += time.perf_counter() - started
        finally:
            os.close(fd)
    return max(seconds, 1e-6)


# --- questions -----------------------------------------------------------------------------------


def look(
    *, base: str | None, digest: str, job: str | None, sender: str | None, shared: str, mode: str
) -> dict[str, Any]:
    """All that decides whether this node gets the set: its folder, what is in it, space, speed.

    base: stage.folder. job: the job that the set goes away with, or None. sender: the host that would
    send it; None where nothing is sent. mode: stage.mode.
    """
    root = private_root(Path(base or node_local_folder()))
    folder = set_folder(root, digest, job)
    damage = ""
    try:
        whole = is_whole(folder, digest)
    except DataError as err:
        whole, damage = False, err.what
    in_place, why = shared_verdict(Path(shared), digest, root, mode)
    return {
        "root": str(root),
        "folder": str(folder),
        "whole": whole,
        "damage": damage,
        "in_place": in_place,
        "why": why,
        "free": shutil.disk_usage(root).free,
        "link_mbit": link_mbit(sender) if sender else 0,
        "jobs": sorted(path.name.removeprefix("job-") for path in root.glob("job-*")),
    }


def link_mbit(host: str) -> int:
    """Speed of this node's interface towards a host; 0 where the kernel does not know it."""
    stats = psutil.net_if_stats().get(interface_towards(host) or "")
    return stats.speed if stats else 0


def copy(*, shared: str, folder: str, digest: str) -> bool:
    """Copy the set from the shared folder to its own; False where another run of this host, which was
    waited for, has put it there. Raises DataError for damaged shards."""
    place = Path(folder)
    with _alone(place.parent):
        if _came_meanwhile(place, digest):
            return False
        for leftover in place.parent.glob(".writing-*"):
            shutil.rmtree(leftover)
        temporary = place.with_name(f".writing-{place.name}")
        begin(temporary=str(temporary))
        with disk_trouble(temporary):
            _copy_files(ShardSet.open(Path(shared)), temporary)
        finish(temporary=str(temporary), folder=folder, digest=digest)
    return True


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other run of this host copies into the folder: runs of a sweep do so at once.

    flock and not a lock: the kernel gives it back with a killed process, and the folder is this
    node's own.
    """
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _copy_files(source: ShardSet, target: Path) -> None:
    shards = source.train + source.val
    done = 0
    with (
        progress("stage", source.num_bytes / 2**20, "MiB") as report,
        ThreadPoolExecutor(COPY_THREADS) as pool,
    ):
        copies = pool.map(lambda shard: _copy_file(shard.path, target / shard.path.name), shards)
        for shard, _ in zip(shards, copies, strict=True):
            done += shard.num_bytes
            report(done / 2**20)
    shutil.copyfile(source.folder / MANIFEST, target / MANIFEST)


def _copy_file(source: Path, target: Path) -> None:
    """A reflink where the file system can (no bytes move), else a copy."""
    with open(source, "rb") as read, open(target, "xb") as write:
        try:
            fcntl.ioctl(write.fileno(), FICLONE, read.fileno())
        except OSError:
            shutil.copyfileobj(read, write, COPY_BLOCK)


def begin(*, temporary: str) -> None:
    """An empty folder for what is coming."""
    folder = Path(temporary)
    with disk_trouble(folder):
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        folder.mkdir(mode=0o700)
        (folder / PARTS).mkdir()


def unpack(*, temporary: str, part: str) -> None:
    """Unpack one part of a pack, and remove it: it takes space that others need."""
    path = Path(temporary) / PARTS / part
    with disk_trouble(path):
        if path.suffix == ".zst":
            import pyarrow

            with (
                pyarrow.input_stream(str(path), compression="zstd") as stream,
                tarfile.open(fileobj=stream, mode="r|") as tar,
            ):
                tar.extractall(temporary, filter="data")
        else:
            with tarfile.open(path) as tar:
                tar.extractall(temporary, filter="data")
        path.unlink()


def finish(*, temporary: str, folder: str, digest: str) -> None:
    """Check every digest, then let the set appear under its name. Raises DataError."""
    arrived, place = Path(temporary), Path(folder)
    try:
        (arrived / PARTS).rmdir()
        shards = ShardSet.open(arrived)
        if shards.digest != digest:
            raise DataError(f"{arrived} has digest {shards.digest[:12]}…, not {digest[:12]}…")
        verify(shards)
        with disk_trouble(arrived):
            stamp(shards)
            if not _came_meanwhile(place, digest):
                shutil.rmtree(place, ignore_errors=True)  # damaged
                arrived.rename(place)
    finally:
        shutil.rmtree(arrived, ignore_errors=True)


def _came_meanwhile(place: Path, digest: str) -> bool:
    """Whether another run of this job has put the set there while ours was on its way."""
    try:
        return is_whole(place, digest)
    except DataError:
        return False


def mark(*, root: str, job: str, run: str) -> None:
    """Note that this run reads what the job has here."""
    folder = Path(root) / f"job-{job}"
    with disk_trouble(folder):
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / f"used-by-{run}").touch()


def unmark(*, root: str, job: str, run: str) -> None:
    """This run is done with what the job has here; the last one removes it."""
    folder = Path(root) / f"job-{job}"
    (folder / f"used-by-{run}").unlink(missing_ok=True)
    if not list(folder.glob("used-by-*")):
        shutil.rmtree(folder, ignore_errors=True)


def forget(*, root: str, names: list[str]) -> int:
    """Remove folders that ended jobs and a broken-off broadcast have left; bytes then free."""
    for name in names:
        shutil.rmtree(Path(root) / name, ignore_errors=True)
    return shutil.disk_usage(root).free


QUESTIONS: dict[str, Callable[..., Any]] = {
    "look": look,
    "copy": copy,
    "begin": begin,
    "unpack": unpack,
    "finish": finish,
    "mark": mark,
    "unmark": unmark,
    "forget": forget,
}
