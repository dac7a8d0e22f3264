"""Nodes that share nothing but the network: project, results and data are on the first node's disk.

In each test the project's directory is hidden from all nodes but the first. One cluster for all.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from support.repository import REPOSITORY

from forge.core import json_lines
from forge.core.files import read_json
from tools.slurm_cluster.cluster import Cluster

from .job_run import MOST_LOST, PAUSE_FOLDER, PAUSES, Uninterrupted, machine
from .project import Project
from .test_programs import COMMANDS, LABS, ProgramRun, download

FIRST_NODE = {"stage": {"project": "auto", "results": "first_node"}}


@pytest.fixture
def hidden_project(
    cluster: Cluster, nodes: Callable[[int], list[str]], shared_folder: Path
) -> Path:
    """A project with Forge's code and an environment, which only the first of three nodes sees. Its
    packages are those of this environment, which is too large to be sent in a test."""
    project = shared_folder / "project"
    shutil.copytree(REPOSITORY / "forge", project / "forge")
    shutil.copytree(PAUSE_FOLDER, project / "pause")
    make = [sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(project / ".venv")]
    subprocess.run(make, check=True)
    packages = Path(sysconfig.get_path("purelib"))
    own = project / ".venv" / packages.relative_to(sys.prefix)
    # The pause is on the first node only: others do not see its directory. Before the standard library,
    # in which Debian has a sitecustomize of its own.
    first = f"import sys; sys.path.insert(0, {str(project / 'pause')!r})"
    (own / "packages.pth").write_text(f"{packages}\n{first}\n")
    (own / "__editable__.forge.pth").write_text(f"{project}\n")
    for host in nodes(3)[1:]:
        cluster.hide(host, project)
    return project


@dataclass
class LoneRun(ProgramRun):
    """These commands in a job of two nodes, the first of which alone sees the project."""

    commands: Sequence[str] = ("stage", "preflight", "train")

    @property
    def project(self) -> Path:
        return self.folder.parents[1]

    def submit(self, *options: str, nodes: int = 2) -> str:
        self.folder.parent.mkdir(exist_ok=True)
        file = self.project / "machine.yaml"
        file.write_text(yaml.safe_dump(machine(self.launcher, **{**FIRST_NODE, **self.keys})))
        where = (
            f"{self.config} --run={self.folder.name} --results={self.folder.parent} --machine={file}"
            f" --nodes=2 --ranks-per-node={self.ranks_per_node}"
        )
        forge = f"{self.project}/.venv/bin/python -m forge"
        *first, last = (f"{forge} {command} {where}" for command in self.commands)
        others = sorted(set(self.cluster.nodes) - set(self.names))
        return self.cluster.submit(
            *(f"--nodes={nodes}", f"--ntasks-per-node={self.ranks_per_node}"),
            *("--cpus-per-task=1", "--mem=1800", "--time=10", "--requeue"),
            *("--open-mode=append", f"--output={self.output}"),
            *(f"--nodelist={self.names[0]}", f"--exclude={','.join(others)}", *options),
            f"--wrap={' && '.join([*first, f'exec {last}'])}",
            cwd=self.project,
            env={"FORGE_TEST_PAUSE": ",".join(map(str, self.pauses))},
        )

    def said(self) -> str:
        return super().said() + self.output.read_text()[-3000:]

    def _all_ranks_say(self, word: str, step: int) -> bool:
        """Of rank 0: the others wait for it in a collective."""
        return any((self.folder / f".pause/{step}").glob(f"{word}-*"))


@pytest.fixture
def new_lab(
    cluster: Cluster, nodes: Callable[[int], list[str]], hidden_project: Path
) -> Callable[[str], LoneRun]:
    """new_lab("bert-cpu"): the lab's script in the hidden project."""

    def make(lab: str) -> LoneRun:
        shutil.copytree(LABS / lab, hidden_project / lab)
        values = yaml.safe_load((LABS / lab / "config.yaml").read_text())
        del values["runs"]
        values["data"] = str(hidden_project / "data")
        values["program"] |= {"source": str(hidden_project / lab), "goal": 10**6}
        values["program"]["command"] = ["python", "train.py", *COMMANDS[lab]]
        config = hidden_project / "config.yaml"
        config.write_text(yaml.safe_dump(values))
        if "inputs" in values["program"]:
            download(config)
        folder = hidden_project / "results" / "program"
        return LoneRun(folder, cluster, cluster.nodes[:3], config, "srun", 1)

    return make


@pytest.fixture
def new_lone_run(
    cluster: Cluster, hidden_project: Path, tiny_config: Path
) -> Callable[[], LoneRun]:
    """new_lone_run(): the tiny training of Forge's trainer in the hidden project."""

    def make() -> LoneRun:
        values = yaml.safe_load(tiny_config.read_text())
        shutil.copytree(values["data"], hidden_project / "data")
        values["data"] = str(hidden_project / "data")
        config = hidden_project / "config.yaml"
        config.write_text(yaml.safe_dump(values))
        folder = hidden_project / "results" / "base"
        names = cluster.nodes[:3]
        run = LoneRun(folder, cluster, names, config, "srun", 1, pauses=PAUSES[:2])
        run.commands = ("stage", "train")
        return run

    return make


@pytest.mark.weekly
def test_trainer_loses_nothing_to_a_signal_and_at_most_an_interval_to_a_power_cut(
    new_lone_run: Callable[[], LoneRun], uninterrupted: Uninterrupted, cluster: Cluster
) -> None:
    before_a_signal, before_a_power_cut, _ = PAUSES
    run = new_lone_run()
    job = run.submit("--partition=low")
    run.wait_for_pause(before_a_signal)
    cluster.run("scancel", "--signal=TERM", job)
    run.end_pause_when_told_to_stop(before_a_signal)
    assert run.wait_for_event("requeue")["cause"] == "SIGTERM"
    # The other node gets the checkpoint, or it could not resume.
    assert run.wait_for_event("init", 2)["step"] == before_a_signal
    dark = run.events("launch")[-1]["nodes"][1]
    struck = run.during_pause(before_a_power_cut, lambda: cluster.power_cut(dark))
    assert run.wait_for_end(job)["ExitCode"] == "0:0", run.said()
    assert dark not in run.events("launch")[-1]["nodes"]
    assert run.steps_lost(struck) <= MOST_LOST
    uninterrupted.equals(run)
    for host in run.events("launch")[-1]["nodes"]:
        assert list(run.paths.logs.glob(f"*.{host}.*.log"))
        assert json_lines.read(run.paths.monitor / f"{host}.jsonl")


@pytest.mark.weekly
def test_lab_resumes_on_nodes_that_get_its_checkpoint(
    new_lab: Callable[[str], LoneRun], cluster: Cluster
) -> None:
    run = new_lab("bert-cpu")
    job = run.submit("--partition=low")
    step = run.wait_for_seal()
    # What the other node's rank saved is part of it.
    seal = read_json(run.paths.checkpoints / f"checkpoint-{step}.forge.json")
    assert {"model.safetensors", "rng_state_0.pth", "rng_state_1.pth"} <= set(seal["files"])
    cluster.run("scancel", "--signal=TERM", job)
    assert run.wait_for_event("requeue")["cause"] == "SIGTERM"
    saved = run.latest_step()
    assert run.wait_for_event("launch", 2)["step"] == saved >= step
    assert f"checkpoint-{saved} (" in run.output.read_text()
    run.wait_for_seal(beyond=saved)
    run.paths.stop.touch()
    assert run.wait_for_end(job)["ExitCode"] == "75:0"
    run.is_validated()
    for rank, host in enumerate(run.events("launch")[-1]["nodes"]):
        log = run.paths.logs / f"{job}.1.{host}.{rank}.log"
        assert f"[RANK {rank}] step {saved // 10 * 10 + 10} of" in log.read_text()


def test_workflow_trains_and_validates_on_nodes_of_which_the_first_has_the_project(
    new_project: Callable[..., Project], cluster: Cluster
) -> None:
    project = new_project(machine=FIRST_NODE)
    first, other = cluster.nodes[:2]
    project.edit_machine({"slurm": {"options": f"--nodelist={first}"}})
    path = project.profile_folder / "config.yaml"
    values = yaml.safe_load(path.read_text())
    values["default-resources"]["slurm_extra"] = f"'--nodelist={first}'"
    path.write_text(yaml.safe_dump(values))
    cluster.hide(other, project.folder)
    assert project.end(project.start()) == 0, project.said()
    assert project.run().paths.validated.exists()
    assert project.run().events("launch")[0]["nodes"] == [first, other]
