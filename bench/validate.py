"""How long does a check of all digests of a checkpoint take, against read and blake3 of these bytes?

python -m bench.validate [--quick]    about 30 s: 512 MiB in four files, four threads, in turns
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import blake3

from bench.manifests import manifest_of
from forge.checkpoint import directory
from forge.checkpoint.manifest import StoredFile
from forge.core.files import digest_file

NUM_FILES = 4  # as one rank writes them
THREADS = 4  # of Checkpoint.bad_files
PIECE_BYTES = 2**20
GOAL = 1.3


def make_checkpoint(folder: Path, size: int) -> directory.Checkpoint:
    """A folder of random bytes with a manifest that is right."""
    files = {}
    for number in range(NUM_FILES):
        path = folder / f"__0_{number}.distcp"
        path.write_bytes(os.urandom(size // NUM_FILES))
        files[path.name] = StoredFile(bytes=path.stat().st_size, digest=digest_file(path))
    manifest_of(1).with_files(files).write(folder)
    return directory.Checkpoint.open(folder)


def read_and_digest(hasher: Callable[[], Any]) -> Callable[[Path], str]:
    """The raw work on one file, in pieces."""

    def work(path: Path) -> str:
        found, buffer = hasher(), memoryview(bytearray(PIECE_BYTES))
        with open(path, "rb", buffering=0) as file:
            while length := file.readinto(buffer):
                found.update(buffer[:length])
        return found.hexdigest()

    return work


def memory_map(path: Path) -> str:
    return blake3.blake3().update_mmap(path).hexdigest()


def on_all_files(work: Callable[[Path], str], folder: Path) -> Callable[[], None]:
    paths = sorted(folder.glob("*.distcp"))

    def run() -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            assert len(list(pool.map(work, paths))) == NUM_FILES

    return run


def check(folder: Path) -> Callable[[], None]:
    def run() -> None:
        assert list(directory.Checkpoint.open(folder).bad_files()) == []

    return run


def forget(folder: Path) -> None:
    """Drop the files from the page cache, so that they come from the disk."""
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def measure(
    ways: dict[str, Callable[[], None]], folder: Path, rounds: int, *, cold: bool
) -> dict[str, list[float]]:
    """Seconds of each way by round; the ways take turns, and another one begins each round."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    order = list(ways)
    for number in range(rounds + 1):
        for way in order:
            if cold:
                forget(folder)
            start = time.perf_counter()
            ways[way]()
            if number:
                times[way].append(time.perf_counter() - start)
        order.append(order.pop(0))
    return times


def main() -> None:
    import pandas as pd

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="little data, to see that it runs")
    options = parser.parse_args()
    size, rounds = (2**24, 3) if options.quick else (2**29, 9)
    rows = []
    with tempfile.TemporaryDirectory(dir=".") as name:  # /tmp may be memory
        folder = Path(name)
        make_checkpoint(folder, size)
        limit = "read + blake3 (limit)"
        ways = {
            "forge": check(folder),
            limit: on_all_files(read_and_digest(blake3.blake3), folder),
            "blake3 of memory maps": on_all_files(memory_map, folder),
            "read + sha256": on_all_files(read_and_digest(hashlib.sha256), folder),
        }
        for cold in (False, True):
            times = measure(ways, folder, rounds, cold=cold)
            rows += [
                {
                    "files": "from the disk" if cold else "in the page cache",
                    "way": way,
                    "ms": statistics.median(seconds) * 1e3,
                    "GiB/s": size / 2**30 / statistics.median(seconds),
                    "of the limit": statistics.median(
                        a / b for a, b in zip(seconds, times[limit], strict=True)
                    ),
                }
                for way, seconds in times.items()
            ]
    print(f"{size / 2**20:.0f} MiB in {NUM_FILES} files, {THREADS} threads,", end=" ")
    print(f"medians of {rounds} rounds; goal for forge: {GOAL} of the limit")
    print(pd.DataFrame(rows).to_string(index=False, float_format="{:,.2f}".format))


if __name__ == "__main__":
    main()
