"""A plain DDP script as a job on two nodes, struck in the middle: it resumes from the last sealed
checkpoint, and at most the steps of one interval are trained again."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from forge.core.files import read_json
from tools.slurm_cluster.cluster import Cluster
from tools.slurm_cluster.machines import wait_until

from .job_run import JobRun, forge

LAB = Path(__file__).parents[2] / "config/labs/six-nodes"
INTERVAL = 20  # steps between checkpoints
PRINTED = 10  # the script prints every tenth step


@dataclass
class ProgramRun(JobRun):
    """The script as `forge train` under sbatch. It trains until a STOP file ends it."""

    def latest_step(self) -> int:
        return int(re.findall(r"\d+", self.paths.latest.readlink().name)[0])

    def wait_for_seal(self, beyond: int = 0) -> int:
        wait_until(
            lambda: self.paths.latest.is_symlink() and self.latest_step() > beyond,
            180,
            f"a sealed checkpoint beyond step {beyond}",
            self.said,
        )
        return self.latest_step()

    def last_printed(self, launch: dict[str, Any]) -> int:
        """The last step that rank 0 of this launch has printed."""
        log = f"{launch['job']}.{launch['restart']}.{launch['nodes'][0]}.0.log"
        text = (self.paths.logs / log).read_text().split(f"launch={launch['launch']}")[1]
        text = text.partition("[RANK 0] WORLD_SIZE=2 host=")[0]
        return max(map(int, re.findall(r"^step (\d+) loss", text, re.MULTILINE)), default=0)

    def ends_well(self, job: str) -> None:
        """It trains on after the event; the STOP file ends it with everything sealed."""
        first, again = (self.wait_for_event("launch", number, 180) for number in (1, 2))
        assert self.last_printed(first) - again["step"] <= INTERVAL + PRINTED
        self.wait_for_seal(again["step"])
        self.paths.stop.touch()
        ended = self.wait_for_end(job)
        assert ended["ExitCode"] == "75:0"
        step = self.latest_step()
        stop = self.events("stop")[-1]
        assert (stop["cause"], stop["step"]) == ("STOP file", step)
        checked = self.folder.parent / "check.yaml"
        checked.write_text(self.config.read_text())
        forge("validate", checked, f"--run={self.folder.name}", f"--results={self.folder.parent}")
        assert read_json(self.paths.validation)["step"] == step


@pytest.fixture
def new_program(
    cluster: Cluster, nodes: Callable[[int], list[str]], shared_folder: Path
) -> Callable[..., ProgramRun]:
    """new_program("srun"): the script on two of three nodes, one rank on each, to be submitted."""

    def make(launcher: str) -> ProgramRun:
        values = yaml.safe_load((LAB / "config.yaml").read_text())
        del values["runs"]
        command = ["python", "train.py", "--steps", "1000000", "--save-every", str(INTERVAL)]
        values["program"] |= {"source": str(LAB), "goal": 10**6}
        values["program"]["command"] = [*command, "--sleep", "0.05"]
        config = shared_folder / "config.yaml"
        config.write_text(yaml.safe_dump(values))
        folder = shared_folder / "results" / "ddp"
        return ProgramRun(folder, cluster, nodes(3), config, launcher)

    return make


def test_preempted_program_saves_and_resumes_after_the_other_job(
    new_program: Callable[..., ProgramRun], cluster: Cluster
) -> None:
    run = new_program("torchrun")
    job = run.submit("--partition=low")
    run.wait_for_seal()
    hosts = run.events("launch")[-1]["nodes"]
    cluster.submit(
        *("--partition=high", "--exclusive", "--nodes=2", f"--nodelist={','.join(hosts)}"),
        *("--output=/dev/null", "--wrap=sleep 2"),
    )
    requeued = run.wait_for_event("requeue", timeout=120)
    again = run.wait_for_event("launch", 2, 180)
    assert again["step"] == requeued["step"]  # saved when it was asked to stop
    assert run.last_printed(run.events("launch")[0]) <= again["step"]
    run.ends_well(job)


def test_killed_rank_of_a_program_starts_again_inside_the_allocation(
    new_program: Callable[..., ProgramRun],
) -> None:
    run = new_program("srun")
    job = run.submit()
    run.wait_for_seal()
    [program] = psutil.Process(run.ranks()[-1].pid).children()
    program.send_signal(signal.SIGKILL)
    run.ends_well(job)
    [lost] = run.events("lost")
    assert re.match(r"rank \d: its program was killed by SIGKILL", lost["message"])
    assert run.events("requeue") == []


def test_power_cut_sends_a_program_to_other_nodes(
    new_program: Callable[..., ProgramRun], cluster: Cluster
) -> None:
    run = new_program("srun")
    job = run.submit()
    run.wait_for_seal()
    dark = run.events("launch")[-1]["nodes"][1]
    cluster.power_cut(dark)
    run.ends_well(job)
    assert dark not in run.events("launch")[-1]["nodes"]
