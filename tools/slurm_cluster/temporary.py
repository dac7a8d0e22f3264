"""A cluster for the time of one process. Clusters whose process died are removed on the way."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from .cluster import Cluster
from .machines import own_folder
from .settings import Settings

# Longer than the others take to remove the clusters that dead processes left.
PATIENCE_SEC = 300


@contextmanager
def locked(path: Path, *, patience: float = PATIENCE_SEC) -> Iterator[None]:
    """Hold a lock on the file (flock, so a killed process holds none). TimeoutError when another
    process holds it for longer than `patience` seconds."""
    with open(path, "a") as file:
        end = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise TimeoutError(f"{path} was locked for {patience:g} s") from None
            time.sleep(0.05)
        yield


@contextmanager
def temporary_cluster(base: Path, name: str, settings: Settings) -> Iterator[Cluster]:
    """A cluster in base/tests-NAME, started here and removed at the end. No other process may use
    the name at the same time."""
    folder = own_folder(base) / f"tests-{name}"
    with ExitStack() as owner:
        with locked(base / "tests.lock"):  # a folder without its lock counts as left behind
            _remove_dead(base)
            own_folder(folder)
            owner.enter_context(locked(folder / "members.lock", patience=0))
        cluster = Cluster(folder, settings)
        try:
            cluster.up()
            yield cluster
        finally:
            with locked(base / "tests.lock"):  # nobody takes a folder that vanishes for a dead one
                _remove(folder)


def _remove_dead(base: Path) -> None:
    for folder in base.glob("tests-*/"):
        with contextlib.suppress(TimeoutError), locked(folder / "members.lock", patience=0):
            _remove(folder)


def _remove(folder: Path) -> None:
    Cluster(folder).down()
    shutil.rmtree(folder)
