"""Ranks in containers of podman, stopped by Slurm or killed by SIGKILL. A container is no child of its
client, so each way to end must leave no process behind.

The image is the root directory of this machine, below a layer that takes what is written.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import sys
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import yaml

from forge.core.files import read_json
from forge.core.paths import RunPaths
from tools.slurm_cluster.cluster import Cluster
from tools.slurm_cluster.machines import wait_until

from .job_run import JobRun, Uninterrupted, machine
from .test_preflight import MODEST
from .test_stops import WARNED, reach_time_limit

# What the kernel of this machine, or the namespaces of the test cluster, ask for.
ARGUMENTS = ["--runtime=/usr/sbin/runc", "--ulimit=nofile=4096:4096", "--ulimit=nproc=4096:4096"]
CONTAINER = {
    "image": "/",
    "engine": "podman",
    "python": sys.executable,
    "arguments": ARGUMENTS,
}


@pytest.fixture
def podman(shared_folder: Path) -> dict[str, str]:
    """Environment of a podman whose files are on each node's own disk, below a name that is in the
    command lines of its processes."""
    if not shutil.which("podman") or not Path("/usr/sbin/runc").exists():
        pytest.skip("needs podman and runc")
    file = shared_folder / "storage.conf"
    root = f"/tmp/containers-{uuid.uuid4().hex}"
    file.write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{root}/graph"\nrunroot = "{root}/run"\n'
    )
    return {"CONTAINERS_STORAGE_CONF": str(file), "PODMAN_ROOT": root}


def processes(run: JobRun) -> list[str]:
    """Command lines of all living processes of the run, those of its containers' engine too."""
    marks = (run.environment["PODMAN_ROOT"], str(run.folder.parent))
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess):
            line = " ".join(process.cmdline())
            if process.status() != psutil.STATUS_ZOMBIE and any(mark in line for mark in marks):
                found.append(line)
    return found


def wait_until_none_is_left(run: JobRun, timeout: float = 60) -> None:
    wait_until(
        lambda: not processes(run),
        timeout,
        "without processes of containers",
        lambda: "\n".join(processes(run)),
        every=0.2,
    )


def client_of(rank: psutil.Process) -> psutil.Process:
    """The task of Slurm for a rank: the shell of its node that has the same words at its end."""
    words, node = rank.cmdline(), rank.parents()[1]  # pid 1 there, which conmon belongs to
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess):
            line = process.cmdline()
            is_client = line[1:2] == ["-c"] and line[-len(words) :] == words
            if is_client and node in process.parents():
                return process
    raise AssertionError(f"no client of {words}")


@pytest.mark.weekly
def test_ranks_in_containers_resume_after_each_way_to_end_and_no_process_of_them_is_left(
    new_run: Callable[..., JobRun],
    uninterrupted: Uninterrupted,
    cluster: Cluster,
    podman: dict[str, str],
) -> None:
    before_the_limit, before_a_kill, before_a_cancellation, before_the_end = 15, 30, 50, 70
    pauses = (before_the_limit, before_a_kill, before_a_cancellation, before_the_end)
    run = replace(new_run(pauses=pauses), keys={"container": CONTAINER}, environment=podman)

    job = run.submit(WARNED)
    run.wait_for_pause(before_the_limit)
    [first, second] = run.ranks()
    assert [parent(rank) for rank in (first, second)] == ["conmon", "conmon"]
    reach_time_limit(cluster, run, job, before_the_limit)

    run.wait_for_pause(before_a_kill)
    ranks = run.ranks()
    client_of(ranks[0]).send_signal(signal.SIGKILL)
    wait_until(lambda: not ranks[0].is_running(), 20, "killed with its client", every=0.1)
    run.end_pause(before_a_kill)
    run.wait_for_event("lost")

    run.wait_for_pause(before_a_cancellation)
    cluster.run("scancel", job)
    run.end_pause_when_told_to_stop(before_a_cancellation)
    run.wait_for_end(job)
    assert run.events("stop")[-1]["step"] >= before_a_cancellation, run.said()
    wait_until_none_is_left(run)

    job = run.submit()
    run.wait_for_pause(before_the_end)
    cluster.run("scancel", "--signal=KILL", job)  # as at a time limit that ranks do not obey
    run.wait_for_end(job)
    wait_until_none_is_left(run)
    run.end_pause(before_the_end)

    run.wait_for_end(run.submit())
    uninterrupted.equals(run)
    wait_until_none_is_left(run)


def parent(process: psutil.Process) -> str:
    above = process.parent()
    return above.name() if above else ""


def test_node_without_the_image_is_left_out_and_the_other_is_staged_and_checked_inside(
    cluster: Cluster,
    nodes: Callable[[int], list[str]],
    tiny_config: Path,
    shared_folder: Path,
    podman: dict[str, str],
) -> None:
    has_it, lacks_it = nodes(2)
    image = f"/tmp/image-{uuid.uuid4().hex}"  # each node has a /tmp of its own
    cluster.run("mkdir", image, machine=has_it)
    cluster.run("mount", "--bind", "/", image, machine=has_it)
    file = shared_folder / "machine.yaml"
    keys = {"container": {**CONTAINER, "image": image}, "preflight": {**MODEST, "spare_nodes": 1}}
    keys["environment"] = {"variables": {"NCCL_DEBUG": "WARN"}}
    file.write_text(yaml.safe_dump(machine("srun", **keys) | {"stage": {"mode": "always"}}))
    options = (tiny_config, f"--machine={file}", "--run=base", f"--results={shared_folder}/results")
    done = cluster.run(
        *("salloc", "--quiet", "--nodes=2", f"--nodelist={has_it},{lacks_it}", "--time=5"),
        *("--ntasks-per-node=1", "--cpus-per-task=1", "bash", "-c"),
        'python -m forge stage "$@" && exec python -m forge preflight "$@"',
        *("bash", *options, "--nodes=1", "--ranks-per-node=1"),
        cwd=shared_folder,  # `forge stage` keeps a proof in the project
        env=podman,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    [left_out] = re.findall(
        rf"^stage: continuing without {lacks_it}: .*", done.stderr, re.MULTILINE
    )
    assert "its process ended: Error: " in left_out  # of podman
    found = read_json(RunPaths(shared_folder / "results/base").preflight)
    assert found["chosen"] == [has_it]
    assert f"there is no {image} on {lacks_it}" in found["left_out"][lacks_it]
    [inside] = [node["checks"] for node in found["nodes"] if node["node"] == has_it]
    assert inside[0]["message"].startswith("podman version ")
    assert all(check["status"] == "ok" for check in found["ranks"]["checks"])
