"""Fixtures of the tests on a real Slurm.

FORGE_TEST_SLURM: unset, the tests run where they can; `required`, they fail where they cannot;
`skip`, they are skipped. FORGE_TEST_SLURM_NODES: size of the cluster (6).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.slurm_cluster.cluster import Cluster, base_folder, why_not
from tools.slurm_cluster.machines import ClusterError
from tools.slurm_cluster.settings import Settings, default_partitions
from tools.slurm_cluster.temporary import temporary_cluster

from .job_run import PAUSE, JobRun, Uninterrupted, write_tiny_config
from .project import Project

HERE = Path(__file__).parent
# Without ranks; what validation computes is a matter of a few cases.
CHEAP_VALIDATION = {"validate": {"depth": "digests"}}
LOG = "machines/ctl/slurmctld.log"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test's time limit is for the test: fixtures start and repair the cluster in their own time."""
    for item in items:
        if HERE in item.path.parents and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(func_only=True))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What Slurm said goes below the traceback of a failed test."""
    report = yield
    cluster = getattr(item, "funcargs", {}).get("cluster")
    if report.when == "call" and report.failed and cluster:
        for command in (
            ("sinfo", "-Nl", "-p", "main"),
            ("squeue", "-a", "-l"),
            ("tail", "-n50", LOG),
        ):
            with contextlib.suppress(ClusterError, subprocess.TimeoutExpired):
                said = cluster.run(*command, cwd=cluster.folder, timeout=10).stdout
                report.sections.append((" ".join(command), said))
    return report


def require_slurm() -> None:
    """Skip, or fail, where tests on Slurm are not wanted or cannot run."""
    wish = os.environ.get("FORGE_TEST_SLURM", "")
    if wish == "skip":
        pytest.skip("FORGE_TEST_SLURM=skip")
    if reason := why_not():
        (pytest.fail if wish == "required" else pytest.skip)(reason)


@contextlib.contextmanager
def started(settings: Settings) -> Iterator[Cluster]:
    """A new cluster, where tests on Slurm are wanted and can run."""
    require_slurm()
    with temporary_cluster(base_folder(), uuid.uuid4().hex, settings) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def cluster_of_this_process() -> Iterator[Cluster]:
    """A cluster that the tests of this process have for themselves, one after the other."""
    nodes = int(os.environ.get("FORGE_TEST_SLURM_NODES") or 6)
    # A busy machine needs its time to save and to call scontrol before a preempted job is killed.
    with started(Settings(nodes=nodes, partitions=default_partitions(grace_sec=30))) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster_on_two_networks() -> Iterator[Cluster]:
    """Six nodes whose interfaces have different names, behind one that leads nowhere."""
    names = ("ens1f1", "ens1f1", "ens1f0np0", "ens1f1", "ens1f0", "ens1f0np0")
    interfaces = {f"node{number:02}": name for number, name in enumerate(names, 1)}
    with started(Settings(nodes=6, interfaces=interfaces, decoy="eno1")) as cluster:
        yield cluster


@pytest.fixture
def cluster(cluster_of_this_process: Cluster) -> Iterator[Cluster]:
    """The cluster, for a test that leaves the controller alone and breaks only what `nodes` gave."""
    yield cluster_of_this_process
    cluster_of_this_process.kill_started()


@pytest.fixture
def exclusive_cluster(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, all of which a test may break. Everything is repaired afterwards."""
    yield cluster
    cluster.repair_all()


@pytest.fixture
def nodes(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Callable[[int], list[str]]]:
    """nodes(2): names of two nodes, which the test may break: they are repaired afterwards."""
    taken: list[str] = []

    def take(count: int) -> list[str]:
        taken.extend(cluster.nodes[:count])
        return list(taken)

    yield take
    if taken and "exclusive_cluster" not in request.fixturenames:  # which repairs everything
        cluster.repair(taken)


@pytest.fixture
def shared_folder(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Path]:
    """An empty folder that all machines and pytest see under the same path."""
    folder = cluster.folder / "scratch" / request.node.name.replace("/", "_")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    yield folder
    # What remains of a failed test is for people: all goes when the cluster stops.


@pytest.fixture(scope="session")
def tiny_config(cluster_of_this_process: Cluster) -> Path:
    """The config of a tiny training, its corpus and shards, where all machines see them."""
    return write_tiny_config(cluster_of_this_process.folder / "tiny_config")


@pytest.fixture(scope="session")
def uninterrupted(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
    """The tiny training without any trouble, one for all processes of this pytest run."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    return Uninterrupted(tiny_config, shared / "uninterrupted")


@pytest.fixture
def new_run(
    cluster: Cluster,
    nodes: Callable[[int], list[str]],
    tiny_config: Path,
    shared_folder: Path,
) -> Callable[..., JobRun]:
    """new_run("srun"): the tiny training as a job on two nodes, one rank on each, to be submitted."""

    def make(
        launcher: str = "srun",
        *,
        on: int = 2,
        ranks_per_node: int = 1,
        pauses: Sequence[int] = (PAUSE,),
    ) -> JobRun:
        folder = shared_folder / "results" / "base"
        return JobRun(folder, cluster, nodes(on), tiny_config, launcher, ranks_per_node, pauses)

    return make


@pytest.fixture
def new_project(
    cluster: Cluster,
    nodes: Callable[[int], list[str]],
    tiny_config: Path,
    shared_folder: Path,
) -> Callable[..., Project]:
    """The project with the tiny config, whose tokens exist already, to train on two nodes, one
    rank on each; on=1: a single rank. on=0: it runs no job, so it names all nodes and none is
    repaired."""

    def make(*, on: int = 2, **given: Any) -> Project:
        values = (
            yaml.safe_load(tiny_config.read_text()) | CHEAP_VALIDATION | given.pop("values", {})
        )
        return Project.make(
            shared_folder / given.pop("name", "project"),
            cluster,
            values=values,
            names=nodes(on) if on else cluster.nodes,
            train_run={"nodes": 1 if on == 1 else 2, "tasks_per_node": 1}
            | given.pop("train_run", {}),
            **given,
        )

    return make
