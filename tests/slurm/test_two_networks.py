"""The lab "six-nodes": names of interfaces differ from node to node, and each node's own name leads to a
network over which the others are not reached. Ranks on the wrong interface hang until their timeout."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from forge.core.files import read_json
from tools.slurm_cluster.cluster import Cluster

from .job_run import Progress, machine

LAB = Path(__file__).parents[2] / "config/labs/six-nodes"
STEPS, INTERVAL = 20, 10
ONE_RANK_A_NODE = "--nodes=6 --ranks-per-node=1"


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


def write_lab(folder: Path) -> tuple[Path, Path]:
    """The lab's config with few steps, and a machine.yaml."""
    values = yaml.safe_load((LAB / "config.yaml").read_text())
    del values["runs"]
    command = ["python", "train.py", "--steps", "{goal}", "--save-every", str(INTERVAL)]
    values["program"] |= {"source": str(LAB), "goal": STEPS, "command": command}
    config, file = folder / "config.yaml", folder / "machine.yaml"
    config.write_text(yaml.safe_dump(values))
    file.write_text(yaml.safe_dump(machine("srun")))
    return config, file


def test_lab_runs_over_the_interface_of_each_node(cluster: Cluster, shared_folder: Path) -> None:
    config, file = write_lab(shared_folder)
    where = f"--run=ddp --results={shared_folder}"
    script = (
        f"set -e; python -m forge train {config} {where} --machine={file} {ONE_RANK_A_NODE}\n"
        f"python -m forge validate {config} {where}"
    )
    output = shared_folder / "job.out"
    job = cluster.submit(
        *("--nodes=6", "--ntasks-per-node=1", "--cpus-per-task=1", "--mem=1800", "--time=5"),
        *(f"--output={output}", f"--wrap={script}"),
        env={"MASTER_ADDR": cluster.settings.address("node01"), "MASTER_PORT": "29500"},
    )
    ended = cluster.wait_for_state(job, "COMPLETED FAILED TIMEOUT", 120)
    run = Progress(shared_folder / "ddp")
    assert ended["JobState"] == "COMPLETED", output.read_text() + run.said()
    for rank, node in enumerate(cluster.nodes):
        log = (run.paths.logs / f"{job}.0.{node}.{rank}.log").read_text()
        [banner] = re.findall(rf"^\[RANK {rank}\] WORLD_SIZE=6 host={node} .*$", log, re.MULTILINE)
        assert f" interface={cluster.settings.interfaces[node]} " in banner
    assert [decoy_packets(cluster, node) for node in cluster.nodes] == [0] * 6
    assert read_json(run.paths.validation)["step"] == STEPS


def test_nodes_do_not_reach_each_other_over_the_decoy(cluster: Cluster) -> None:
    one, other = cluster.nodes[:2]
    assert connects(cluster, one, cluster.settings.address(other))
    before = decoy_packets(cluster, one)
    assert not connects(cluster, one, other)  # its name leads there
    assert decoy_packets(cluster, one) > before
