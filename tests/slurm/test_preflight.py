"""Unhealthy nodes of a real allocation: each is named with cause and fix before the deadline, and where
a spare node is there, training gets the others."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from forge.core import json_lines
from forge.core.files import read_json
from forge.core.paths import RunPaths
from forge.slurm import exclude
from tools.slurm_cluster.cluster import REPOSITORY, Cluster

from .job_run import machine

DEADLINE_SEC = 90
LATE_SEC = 10  # what ends at the deadline has ended, and been told, so much later
MODEST = {"min_free_disk_gib": 0, "min_free_memory_gib": 0, "min_open_files": 0}


@dataclass
class Outcome:
    code: int
    text: str
    paths: RunPaths

    @property
    def lines(self) -> dict[str, str]:
        """The line of each node, by its name."""
        nodes = [line for line in self.text.splitlines() if line.startswith("NODE ")]
        return {line.split()[1]: line for line in nodes}

    @property
    def event(self) -> dict[str, Any]:
        return [e for e in json_lines.read(self.paths.events) if e["event"] == "preflight"][-1]

    def failed(self, node: str) -> dict[str, dict[str, str]]:
        """The checks that failed on a node, by name."""
        (found,) = (n for n in read_json(self.paths.preflight)["nodes"] if n["node"] == node)
        return {c["name"]: c for c in found["checks"] if c["status"] == "fail"}


Preflight = Callable[..., Outcome]


@pytest.fixture
def preflight(cluster: Cluster, tiny_config: Path, shared_folder: Path) -> Iterator[Preflight]:
    """The command in an allocation of the given nodes, of which `train` are needed."""
    # Else Slurm ends the allocation when it misses a node for 10 s, earlier than a busy machine is
    # through with its checks.
    cluster.configure(SlurmdTimeout=600)

    def run(
        names: list[str], *, train: int, ranks: int = 1, sec: float = DEADLINE_SEC, **keys: Any
    ) -> Outcome:
        file = shared_folder / "machine.yaml"
        limits = {**MODEST, "deadline_sec": sec, "spare_nodes": len(names) - train}
        file.write_text(yaml.safe_dump(machine("srun", **{"preflight": limits, **keys})))
        done = cluster.run(
            *("salloc", "--quiet", f"--nodes={len(names)}", f"--nodelist={','.join(names)}"),
            *(f"--ntasks-per-node={ranks}", "--cpus-per-task=1", "--time=5"),
            *("python", "-m", "forge", "preflight", tiny_config, f"--machine={file}"),
            *("--run=base", f"--results={shared_folder}/results", "--train.batch_size=60"),
            *(f"--nodes={train}", f"--ranks-per-node={ranks}"),
            check=False,
            timeout=sec + 40,
        )
        found = Outcome(done.returncode, done.stderr, RunPaths(shared_folder / "results/base"))
        assert found.event["seconds"] < sec + LATE_SEC, found.text
        return found

    yield run
    cluster.configure()


def check_of(found: Outcome, node: str, name: str) -> str:
    """The message of this check of a node."""
    (checks,) = (
        n["checks"] for n in read_json(found.paths.preflight)["nodes"] if n["node"] == node
    )
    return next(str(check["message"]) for check in checks if check["name"] == name)


def test_healthy_nodes_pass_each_with_its_line(
    nodes: Callable[[int], list[str]], preflight: Preflight, cluster: Cluster
) -> None:
    names = nodes(2)
    interfaces = {"interfaces": dict.fromkeys(names, "eth0"), "interface": "none0"}
    found = preflight(names, train=2, ranks=2, fabric={"backend": "gloo", **interfaces})
    assert found.code == 0, found.text
    assert sorted(found.lines) == names
    assert all(" OK PY 3." in line and "net=ok" in line for line in found.lines.values())
    where = ", ".join(f"{2 * i + r}={name}:cpu" for i, name in enumerate(names) for r in (0, 1))
    assert f"RANKS world of 4: {where}; all-reduce" in found.text
    assert read_json(found.paths.preflight_pass)["nodes"] == names
    assert (found.event["nodes"], found.event["left_out"]) == (names, {})
    assert all(check_of(found, name, "torch").startswith("imported in ") for name in names)
    checks = {c["name"] for c in read_json(found.paths.preflight)["ranks"]["checks"]}
    assert {"mapping", "all-reduce", "matrix product", "pair bandwidth"} <= checks
    (record,) = found.paths.logs.glob("preflight.*.json")
    assert json.loads(record.read_text()) == read_json(found.paths.preflight)
    assert not found.paths.bad_nodes.exists()


def test_spare_nodes_take_the_place_of_one_that_is_cut_off_and_one_that_loses_large_packets(
    nodes: Callable[[int], list[str]], preflight: Preflight, cluster: Cluster
) -> None:
    """Of the second, Slurm's own messages are lost, too, so that the node cannot even be asked."""
    names = nodes(4)
    cluster.cable_cut(names[1])
    cluster.small_mtu(names[2])
    found = preflight(names, train=2)
    assert found.code == 0, found.text
    assert found.lines[names[1]] == f"NODE {names[1]} FAIL answers=fail"
    chosen = [names[0], names[3]]
    assert read_json(found.paths.preflight_pass)["nodes"] == chosen
    assert found.event["nodes"] == chosen
    assert list(found.event["left_out"]) == names[1:3]
    assert f"training gets {', '.join(chosen)}; unhealthy: {names[1]}, {names[2]}" in found.text
    assert not found.paths.bad_nodes.exists()


def test_without_a_spare_all_unfit_nodes_are_named_and_of_a_pair_that_cannot_talk_one(
    nodes: Callable[[int], list[str]], preflight: Preflight, cluster: Cluster
) -> None:
    """One does not see the project, one has a full /tmp, two of the others cannot talk."""
    names = nodes(5)
    cluster.hide(names[1], REPOSITORY)
    cluster.fill_tmp(names[2], leave_mib=1)
    cluster.block_pair(names[0], names[4])
    found = preflight(names, train=5)
    assert found.code == 69
    assert "2 of 5 nodes are healthy, base needs 5" in found.text
    assert "does not see this Python" in found.failed(names[1])["answers"]["cause"]
    full = found.failed(names[2])["local disk"]
    assert "No space left on device" in full["message"]
    assert "remove old files in /tmp on this node" in full["fix"]
    (check,) = found.failed(names[4]).values()
    assert check["name"] == "reach"
    assert f"{names[4]} and {names[0]} cannot talk" in check["message"]
    assert "it talks to 2 of 3 nodes" in check["cause"]
    assert not found.failed(names[0]) and not found.failed(names[3])
    # Of the six nodes of the partition, the run needs five.
    assert exclude.read(found.paths.bad_nodes) == [names[1]]
    assert f"{names[2]}, {names[4]}: not excluded, since partition main would have" in found.text
    assert not found.paths.preflight_pass.exists()


@pytest.mark.weekly
def test_trouble_that_only_ranks_meet_is_found_by_trying_halves(
    nodes: Callable[[int], list[str]], preflight: Preflight, cluster: Cluster
) -> None:
    """A link so slow that small messages pass, and collectives do not."""
    names = nodes(3)
    cluster.slow_link(names[2], mbit=2)
    # Five trials one after the other, each of them slow on a busy machine.
    found = preflight(names, train=2, sec=2 * DEADLINE_SEC)
    assert found.code == 0, found.text
    assert "3 nodes fail together" in found.text
    assert list(found.event["left_out"]) == [names[2]]
    assert "all-reduces of 16 MiB took longer than" in found.event["left_out"][names[2]]
    assert found.failed(names[2])["collectives"]["fix"].startswith(f"leave {names[2]} out")
    assert found.event["nodes"] == names[:2]


def test_torch_that_one_node_cannot_import_is_named_before_any_rank_starts_there(
    nodes: Callable[[int], list[str]], preflight: Preflight, cluster: Cluster
) -> None:
    """Its metadata are there, so only an import meets the trouble."""
    names = nodes(2)
    found_torch = importlib.util.find_spec("torch")
    assert found_torch and found_torch.origin
    cluster.hide(names[0], Path(found_torch.origin).parent)
    found = preflight(names, train=2)
    assert found.code == 69
    (check,) = found.failed(names[0]).values()
    assert (check["name"], "cannot import torch" in check["message"]) == ("torch", True)
    assert "RANKS world of 1" in found.text
    assert exclude.read(found.paths.bad_nodes) == [names[0]]


def test_uneven_allocation_is_reported_as_what_slurm_gave(
    nodes: Callable[[int], list[str]], cluster: Cluster, tiny_config: Path, shared_folder: Path
) -> None:
    """4 tasks on 2 nodes without --ntasks-per-node: Slurm gives 3 + 1. A network was blamed."""
    names = nodes(2)
    file = shared_folder / "machine.yaml"
    file.write_text(yaml.safe_dump(machine("srun", preflight=MODEST)))
    done = cluster.run(
        *("salloc", "--quiet", "--nodes=2", f"--nodelist={','.join(names)}", "--ntasks=4"),
        *("--cpus-per-task=1", "--time=5", "python", "-m", "forge", "preflight", tiny_config),
        *(f"--machine={file}", "--run=base", f"--results={shared_folder}/results"),
        *("--nodes=2", "--ranks-per-node=2"),
        check=False,
        timeout=DEADLINE_SEC + 40,
    )
    assert done.returncode == 69
    assert f"{names[0]} 3 (3 tasks), {names[1]} 1 (1 tasks)" in done.stderr, done.stderr
    assert "--ntasks-per-node=2" in done.stderr
    assert not list((shared_folder / "results").glob("*/bad_nodes.txt"))
