"""The programs of config/labs as jobs on two nodes, struck in the middle: they resume from the last
sealed checkpoint, and at most the steps of one interval are retrained.

Five of all cases. FORGE_LABS=all (`make labs`): every event with each program and launcher.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml
from support.bert_hub import repositories
from support.hub import served
from support.repository import CLONE

from forge.core import json_lines
from forge.core.files import read_json
from tools.slurm_cluster.cluster import Cluster
from tools.slurm_cluster.machines import wait_until

from . import labs_table
from .job_run import JobRun, forge

LABS = CLONE / "config/labs"
INTERVAL = 20  # steps between checkpoints
COMMANDS = {  # for as long as the test wants
    "six-nodes": ["--steps", "1000000", "--save-every", str(INTERVAL), "--sleep", "0.05"],
    "bert-cpu": [
        *("--subset", "240", "--batch-size", "24", "--epochs", "100000"),
        *("--save-steps", str(INTERVAL), "--out", "{checkpoints}"),
    ],
}


@dataclass
class ProgramRun(JobRun):
    """The script as `forge train` under sbatch. It trains until a STOP file ends it."""

    def latest_step(self) -> int:
        return int(re.findall(r"\d+", self.paths.latest.readlink().name)[0])

    def wait_for_seal(self, beyond: int = 0) -> int:
        wait_until(
            lambda: self.paths.latest.is_symlink() and self.latest_step() > beyond,
            240,
            f"a sealed checkpoint beyond step {beyond}",
            self.said,
        )
        return self.latest_step()

    def last_step(self, launch: str) -> int:
        """The last step that all ranks of this launch had completed, by their heartbeats."""
        lines = json_lines.read(self.paths.metrics)
        steps = [line["step"] for line in lines if line["launch"] == launch]
        return max(steps, default=0)

    def programs(self) -> list[psutil.Process]:
        """The processes of the script, by rank."""
        children = [child for rank in self.ranks() for child in rank.children()]
        found = [child for child in children if "forge.launch.monitor" not in child.cmdline()]
        return sorted(found, key=lambda process: int(process.environ()["RANK"]))

    def is_validated(self) -> None:
        """The last checkpoint is valid, as `forge validate` says on this machine."""
        checked = self.folder.parent / "check.yaml"
        checked.write_text(self.config.read_text())
        forge("validate", checked, f"--run={self.folder.name}", f"--results={self.folder.parent}")
        assert read_json(self.paths.validation)["step"] == self.latest_step()


# --- the events: what happens, and what follows ----------------------------------------------------


@dataclass(frozen=True)
class Struck:
    """What an event did to the job `job` of the run."""

    run: ProgramRun
    cluster: Cluster
    job: str

    def time_limit(self) -> str:
        # Less than the warning time is left at once, so the signal is due; the limit itself is far.
        hours, minutes, _ = map(int, self.cluster.job(self.job)["RunTime"].split(":"))
        limit = hours * 60 + minutes + 3
        self.cluster.run("scontrol", "update", f"JobId={self.job}", f"TimeLimit={limit}")
        assert self.run.wait_for_event("requeue", timeout=120)["cause"] == "SIGUSR1"
        self.cluster.run("scontrol", "update", f"JobId={self.job}", "TimeLimit=10")
        return "saved"

    def preemption(self) -> str:
        hosts = self.run.events("launch")[-1]["nodes"]
        self.cluster.submit(
            *("--partition=high", "--exclusive", "--nodes=2", f"--nodelist={','.join(hosts)}"),
            *("--output=/dev/null", "--wrap=sleep 2"),
        )
        self.run.wait_for_event("requeue", timeout=120)
        return "saved"

    def two_signals(self) -> str:
        for _ in range(2):
            self.cluster.run("scancel", "--signal=TERM", self.job)
        assert self.run.wait_for_event("requeue", timeout=120)["cause"] == "SIGTERM"
        return "saved"

    def scancel(self) -> str:
        self.cluster.run("scancel", self.job)
        return "ended"

    def killed_rank(self) -> str:
        self.run.programs()[-1].send_signal(signal.SIGKILL)
        return "restarted"

    def kill_in_a_save(self) -> str:
        """kill -9 of rank 0's program while it writes a checkpoint. Where the save was faster than the
        signal, the next save is tried."""
        [program, *_] = self.run.programs()
        for _ in range(100):
            half = self._half_written()
            program.send_signal(signal.SIGSTOP)
            if self._is_half_written(half):
                program.send_signal(signal.SIGKILL)
                return "restarted"
            program.send_signal(signal.SIGCONT)
        raise AssertionError("no save lasted as long as a signal takes")

    def _half_written(self) -> Path:
        """The next checkpoint that is being written."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            for path in self.run.paths.checkpoints.glob("checkpoint-*"):
                if self._is_half_written(path):
                    return path
        raise AssertionError(f"no checkpoint is written\n{self.run.said()}")

    @staticmethod
    def _is_half_written(path: Path) -> bool:
        if path.is_dir():
            return not (path / "trainer_state.json").exists()
        return path.suffix == ".writing" and path.exists()

    def power_cut(self) -> str:
        dark = self.run.events("launch")[-1]["nodes"][1]
        self.cluster.power_cut(dark)
        return "lost"


IN_CI = {
    ("six-nodes", "killed_rank", "srun"),
    ("six-nodes", "scancel", "torchrun"),
}
WEEKLY = {
    ("six-nodes", "power_cut", "srun"),
    ("six-nodes", "time_limit", "torchrun"),
    ("bert-cpu", "kill_in_a_save", "srun"),
}
EVENTS = (
    *("time_limit", "preemption", "two_signals", "scancel"),
    *("killed_rank", "kill_in_a_save", "power_cut"),
)
EVERY = [(lab, event, how) for lab in COMMANDS for event in EVENTS for how in ("srun", "torchrun")]
ALL = os.environ.get("FORGE_LABS") == "all"
CASES = [
    pytest.param(case, id="-".join(case), marks=[pytest.mark.weekly] if case in WEEKLY else [])
    for case in EVERY
    if ALL or case in IN_CI | WEEKLY
]


@pytest.fixture
def new_program(
    cluster: Cluster, nodes: Callable[[int], list[str]], shared_folder: Path
) -> Callable[..., ProgramRun]:
    """new_program("six-nodes", "srun"): the lab's script on two of three nodes, to be submitted."""

    def make(lab: str, launcher: str, ranks_per_node: int = 1) -> ProgramRun:
        values = yaml.safe_load((LABS / lab / "config.yaml").read_text())
        del values["runs"]
        values["data"] = str(shared_folder / "data")
        values["program"] |= {"source": str(LABS / lab), "goal": 10**6}
        values["program"]["command"] = ["python", "train.py", *COMMANDS[lab]]
        config = shared_folder / "config.yaml"
        config.write_text(yaml.safe_dump(values))
        if "inputs" in values["program"]:
            download(config)
        folder = shared_folder / "results" / "program"
        return ProgramRun(folder, cluster, nodes(3), config, launcher, ranks_per_node)

    return make


def download(config: Path) -> None:
    """`forge inputs` on the login node, from a hub on the loopback interface."""
    with served(repositories()) as hub, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", hub.url)
        patch.setenv("HF_HOME", str(config.parent / "hf"))
        forge("inputs", config)


@pytest.mark.parametrize("case", CASES)
def test_struck_program_resumes_from_its_last_sealed_checkpoint(
    new_program: Callable[..., ProgramRun], cluster: Cluster, case: tuple[str, str, str]
) -> None:
    lab, event, launcher = case
    # As its README has it; each of its ranks imports transformers, so CI starts half of them.
    run = new_program(lab, launcher, ranks_per_node=2 if ALL and lab == "bert-cpu" else 1)
    job = run.submit("--partition=low", "--signal=SIGUSR1@180")
    run.wait_for_seal()
    struck_at = time.monotonic()
    outcome = getattr(Struck(run, cluster, job), event)()
    if outcome == "ended":  # by a person: it stays ended until somebody submits it again
        run.wait_for_end(job)
        assert run.events("requeue") == []
        assert [stop["step"] for stop in run.events("stop")] == [run.latest_step()], run.said()
        job = run.submit("--partition=low")
    first, again = (run.wait_for_event("launch", number, 240) for number in (1, 2))
    lost = run.last_step(first["launch"]) - again["step"]
    assert lost <= (0 if outcome in ("saved", "ended") else INTERVAL), run.said()
    if outcome == "restarted":
        [found] = run.events("lost")
        assert re.match(r"rank \d: its program was killed by SIGKILL", found["message"])
        assert run.events("requeue") == []
    if event == "kill_in_a_save" and lab == "bert-cpu":
        assert run.events("quarantine")[0]["reasons"] == [
            "it was never sealed: the program ended before its save was known to be complete"
        ]
    if event == "power_cut":
        assert set(first["nodes"]) - set(again["nodes"])
    run.wait_for_seal(beyond=again["step"])
    run.paths.stop.touch()
    assert run.wait_for_end(job)["ExitCode"] == "75:0"
    stop = run.events("stop")[-1]
    assert (stop["cause"], stop["step"]) == ("STOP file", run.latest_step())
    run.is_validated()
    seconds = time.monotonic() - struck_at
    labs_table.note(lab, event, launcher, f"{outcome}, {max(0, lost)} steps, {seconds:.0f} s")
