"""Who may use the cluster when: locks between the tests of several pytest processes.

All locks are flock on files in the cluster's folder, so a killed process holds none.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from .cluster import Cluster
from .machines import ClusterError
from .settings import Settings

# Longer than any case may hold what another one waits for.
PATIENCE_SEC = 900


@contextmanager
def locked(path: Path, *, shared: bool = False, patience: float = PATIENCE_SEC) -> Iterator[None]:
    """Hold a lock on the file. TimeoutError when others hold it for longer than `patience`."""
    with open(path, "a") as file:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        end = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise TimeoutError(f"{path} was locked for {patience:g} s") from None
            time.sleep(0.05)
        yield


@contextmanager
def shared_cluster(base: Path, run_id: str, settings: Settings) -> Iterator[Cluster]:
    """The cluster of this run of the test suite: the first process that comes starts it, the last
    one that leaves stops it. Clusters of runs that died are removed on the way."""
    base.mkdir(parents=True, exist_ok=True)
    folder = base / f"tests-{run_id}"
    doorstep = base / "tests.lock"  # held by whoever comes or leaves
    with ExitStack() as membership:
        with locked(doorstep):
            _remove_dead_runs(base)
            folder.mkdir(exist_ok=True)
            membership.enter_context(locked(folder / "members.lock", shared=True))
        try:
            with locked(folder / "starting.lock"):
                cluster = Cluster(folder, settings)
                cluster.up()
            yield cluster
        finally:
            membership.close()
            with locked(doorstep):
                _remove_unless_used(folder)


def _remove_dead_runs(base: Path) -> None:
    for folder in base.glob("tests-*/"):
        _remove_unless_used(folder)


def _remove_unless_used(folder: Path) -> None:
    with contextlib.suppress(TimeoutError), locked(folder / "members.lock", patience=0):
        Cluster(folder).down()
        shutil.rmtree(folder)


@contextmanager
def turn(cluster: Cluster, *, alone: bool) -> Iterator[None]:
    """The time of one test: with others, or alone. A test that waits to be alone lets no new
    one in, so it waits only for those that have begun."""
    with ExitStack() as held:
        with locked(cluster.folder / "turnstile.lock"):
            held.enter_context(locked(cluster.folder / "cases.lock", shared=not alone))
        yield


@contextmanager
def own_nodes(cluster: Cluster, count: int) -> Iterator[list[str]]:
    """`count` nodes that no other test has, repaired afterwards. Tests are served in turn."""
    if count > len(cluster.nodes):
        raise ClusterError(f"{count} nodes asked for, the cluster has {len(cluster.nodes)}")
    with ExitStack() as held:
        with locked(cluster.folder / "nodes.lock"):
            names = _take(cluster, count, held)
        try:
            yield names
        finally:
            cluster.repair(names)


def _take(cluster: Cluster, count: int, held: ExitStack) -> list[str]:
    end = time.monotonic() + PATIENCE_SEC
    while True:
        with ExitStack() as attempt:
            names = []
            for name in cluster.nodes:
                with contextlib.suppress(TimeoutError):
                    attempt.enter_context(locked(cluster.folder / f"{name}.lock", patience=0))
                    names.append(name)
                if len(names) == count:
                    held.push(attempt.pop_all())
                    return names
        if time.monotonic() >= end:
            raise TimeoutError(f"no {count} nodes were free for {PATIENCE_SEC} s")
        time.sleep(0.05)
