"""The lab "six-nodes": names of interfaces differ from node to node, and each node's own name leads to a
network over which the others are not reached. Ranks on the wrong interface hang until their timeout."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from support.repository import CLONE

from forge.core.files import read_json
from tools.slurm_cluster.cluster import Cluster

from .job_run import Progress, machine

LAB = CLONE / "config/labs/six-nodes"
STEPS, INTERVAL = 20, 10


@pytest.fixture
def cluster(cluster_on_two_networks: Cluster) -> Cluster:
    return cluster_on_two_networks


def decoy_packets(cluster: Cluster, node: str) -> int:
    """How many packets the node has sent over its decoy interface."""
    text = cluster.run("cat", "/proc/net/dev", machine=node).stdout
    [line] = re.findall(rf"^ *{cluster.settings.decoy}:(.*)$", text, re.MULTILINE)
    return int(line.split()[9])


def connects(cluster: Cluster, source: str, address: str) -> bool:
    """Whether the slurmd at this address accepts a connection. The kernel gives up after 3 s."""
    script = f"exec 3<>/dev/tcp/{address}/6818"
    return cluster.run("bash", "-c", script, machine=source, check=False).returncode == 0


def write_lab(folder: Path, launcher: str, **fabric: object) -> tuple[Path, Path]:
    """The lab's config with few steps, and a machine.yaml."""
    values = yaml.safe_load((LAB / "config.yaml").read_text())
    command = ["python", "train.py", "--steps", "{goal}", "--save-every", str(INTERVAL)]
    values["program"] |= {"source": str(LAB), "goal": STEPS, "command": command}
    config, file = folder / "config.yaml", folder / "machine.yaml"
    config.write_text(yaml.safe_dump(values))
    # Imports of six ranks take their time on a busy machine; no rank of these tests is lost.
    fabric |= {"backend": "gloo", "timeout_sec": 60}
    preflight = {"packages": ["yaml"]}
    file.write_text(yaml.safe_dump(machine(launcher, fabric=fabric, preflight=preflight)))
    return config, file


@pytest.fixture
def run_lab(cluster: Cluster, shared_folder: Path) -> Callable[..., tuple[Progress, str]]:
    """run_lab(commands, config, machine_file): these subcommands as one job, with one rank on each of its
    nodes; the run, and what the job printed."""

    def run(
        commands: list[str], config: Path, file: Path, nodes: int = 6, **exported: str
    ) -> tuple[Progress, str]:
        where = f"{config} --run=ddp --results={shared_folder}"
        ranks = f"--machine={file} --nodes={nodes} --ranks-per-node=1"
        lines = [
            f"python -m forge {name} {where} {ranks if name != 'validate' else ''}"
            for name in commands
        ]
        output = shared_folder / "job.out"
        job = cluster.submit(
            *(
                f"--nodes={nodes}",
                "--ntasks-per-node=1",
                "--cpus-per-task=1",
                "--mem=1800",
                "--time=5",
            ),
            *(f"--output={output}", f"--wrap={' && '.join(lines)}"),
            env=exported,
        )
        ended = cluster.wait_for_state(job, "COMPLETED FAILED TIMEOUT", 120)
        progress = Progress(shared_folder / "ddp")
        assert ended["JobState"] == "COMPLETED", output.read_text() + progress.said()
        return progress, output.read_text()

    return run


def assert_each_on_its_interface(run: Progress, cluster: Cluster) -> None:
    """The log of every rank names its node's interface, and no node has sent anything over its decoy."""
    [launch] = run.events("launch")
    for rank, node in enumerate(launch["nodes"]):
        [log] = run.paths.logs.glob(f"*.{node}.{rank}.log")
        found = re.findall(
            rf"^\S+ \[RANK {rank}\] .* host={node} .* interface=(\S+)", log.read_text(), re.M
        )
        assert set(found) == {cluster.settings.interfaces[node]}
    assert [decoy_packets(cluster, node) for node in cluster.nodes] == [0] * 6


@pytest.mark.weekly
def test_lab_passes_preflight_trains_and_is_validated_at_an_exported_address(
    cluster: Cluster, shared_folder: Path, run_lab: Callable[..., tuple[Progress, str]]
) -> None:
    files = write_lab(shared_folder, "srun", infiniband="never", master_port="15000-20000")
    address = cluster.settings.address("node01")
    run, said = run_lab(["preflight", "train", "validate"], *files, MASTER_ADDR=address)
    assert_each_on_its_interface(run, cluster)
    assert f"keeping your exported MASTER_ADDR={address} (Forge would use node01)" in said
    assert said.count("imports=ok") == 6
    assert read_json(run.paths.validation)["step"] == STEPS


@pytest.mark.weekly
def test_torchrun_takes_the_address_of_the_machine_file(
    cluster: Cluster, shared_folder: Path, run_lab: Callable[..., tuple[Progress, str]]
) -> None:
    address = cluster.settings.address("node01")
    files = write_lab(shared_folder, "torchrun", master_addr=address)
    run, _ = run_lab(["train"], *files, nodes=3)
    assert_each_on_its_interface(run, cluster)
    assert read_json(run.paths.trained)["step"] == STEPS


@pytest.fixture
def without_names(cluster: Cluster, shared_folder: Path) -> Iterator[None]:
    """The first three nodes resolve no name of a node; the first one resolves its own."""
    own = f"{cluster.settings.address('node01')} node01\n"
    for node in cluster.nodes[:3]:
        file = shared_folder / f"hosts-{node}"
        file.write_text(f"127.0.0.1 localhost\n{own if node == 'node01' else ''}")
        cluster.run("mount", "--bind", file, "/etc/hosts", machine=node)
    yield
    for node in cluster.nodes[:3]:
        cluster.run("umount", "--lazy", "/etc/hosts", machine=node)


@pytest.mark.weekly
@pytest.mark.usefixtures("without_names")
@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_names_that_do_not_resolve_give_way_to_slurms_addresses(
    cluster: Cluster,
    shared_folder: Path,
    run_lab: Callable[..., tuple[Progress, str]],
    launcher: str,
) -> None:
    run, said = run_lab(["preflight", "train"], *write_lab(shared_folder, launcher), nodes=3)
    assert_each_on_its_interface(run, cluster)
    address = cluster.settings.address("node01")
    why = f"MASTER_ADDR={address}, Slurm's address of node01: the name does not resolve on node02"
    assert f"{why} and 1 more" in said
    assert f" NNODES=3 ranks=3 MASTER_ADDR={address} " in said
    assert read_json(run.paths.trained)["step"] == STEPS


def test_nodes_do_not_reach_each_other_over_the_decoy(cluster: Cluster) -> None:
    one, other = cluster.nodes[:2]
    assert connects(cluster, one, cluster.settings.address(other))
    before = decoy_packets(cluster, one)
    assert not connects(cluster, one, other)  # its name leads there
    assert decoy_packets(cluster, one) > before
