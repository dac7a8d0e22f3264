"""A training in a Slurm job: how tests submit it, wait for its steps, and see what it lost."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from forge.checkpoint import resume
from forge.core import json_lines
from forge.core.files import read_json
from forge.core.paths import RunPaths
from tools.slurm_cluster.cluster import REPOSITORY, Cluster
from tools.slurm_cluster.machines import wait_until
from tools.slurm_cluster.rank_processes import rank_processes
from tools.slurm_cluster.temporary import locked

GOAL, INTERVAL = 80, 20  # steps; steps between checkpoints
# Ranks wait before this step until the test has done what it is about: see pause/sitecustomize.py.
PAUSE = 50
# The same, of a run that is struck several times: as far from the checkpoint before each.
PAUSES = (30, 50, 70)
# Of a run that is struck there: back to the checkpoint at 20 where that at 40 is not committed yet.
MOST_LOST = PAUSE - 1 - INTERVAL
PAUSE_FOLDER = Path(__file__).parent / "pause"
TINY_CONFIG: dict[str, Any] = {
    "tokenizer": {"vocab_size": 300, "sample_mib": 1},
    "model": {"dim": 32, "layers": 2, "heads": 2, "ffn_dim": 64, "dropout": 0.1},
    "train": {
        **{"seq_len": 16, "batch_size": 4, "max_steps": GOAL, "warmup_steps": 3},
        **{"log_every": 1, "eval_every": 40, "eval_samples": 8, "checkpoint_every": INTERVAL},
    },
    "report": {"prompts": ["the "], "sample_tokens": 4},
}
# A peer that is gone is noticed by the others after this. Ranks also have this long to meet: on a busy
# machine the imports of four ranks end seconds apart.
FABRIC_TIMEOUT_SEC = 20


def machine(launcher: str, **keys: Any) -> dict[str, Any]:
    """A machine.yaml for the test cluster."""
    return {
        "launcher": launcher,
        "stop_grace_sec": 30,
        "fabric": {"backend": "gloo", "timeout_sec": FABRIC_TIMEOUT_SEC},
        "stage": {"mode": "never"},
        **keys,
    }


def paused(*steps: int) -> dict[str, str]:
    """Environment of commands whose ranks wait before these steps (none given: before step PAUSE) for
    Progress.end_pause()."""
    path = [str(PAUSE_FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    numbers = ",".join(map(str, steps or [PAUSE]))
    return {"FORGE_TEST_PAUSE": numbers, "PYTHONPATH": os.pathsep.join(path)}


def paced(step_sec: float) -> dict[str, str]:
    """Environment of commands whose ranks take so long for each step, until Progress.end_pace()."""
    return {**paused(), "FORGE_TEST_PAUSE": "", "FORGE_TEST_PACE": str(step_sec)}


def write_tiny_config(folder: Path) -> Path:
    """A corpus and its shards in the folder; the config file."""
    corpus = folder / "corpus"
    corpus.mkdir(parents=True)
    for number in range(24):
        words = (f"{number * word % 97} times {word} is the word" for word in range(60))
        (corpus / f"{number:02}.txt").write_text(", ".join(words))
    tokens = {"inputs": [str(corpus)], "val_fraction": 0.3}
    values = {**TINY_CONFIG, "data": str(folder / "data"), "tokenize": tokens}
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(values))
    for command in ("tokenizer", "tokenize"):
        forge(command, config)
    return config


def forge(*arguments: str | Path) -> None:
    """A command on this machine, outside of Slurm."""
    line = [sys.executable, "-m", "forge", *map(str, arguments)]
    done = subprocess.run(line, check=False, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


@dataclass
class Progress:
    """What can be read of a run on the way, wherever its ranks are."""

    folder: Path

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.folder)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in json_lines.read(self.paths.events) if event["event"] == name]

    def train_lines(self) -> list[dict[str, Any]]:
        return [line for line in json_lines.read(self.paths.metrics) if line["kind"] == "train"]

    def losses(self) -> dict[int, float]:
        """The loss of each step. A step that was retrained must have had the same one."""
        found: dict[int, float] = {}
        for line in self.train_lines():
            step, loss = line["step"], line["loss"]
            first = found.setdefault(step, loss)
            assert first == loss, f"step {step} had loss {first}, retrained {loss}"
        return found

    def weights_digest(self) -> str:
        return str(read_json(self.paths.trained)["weights_digest"])

    def wait_for_pause(self, step: int = PAUSE, timeout: float = 240) -> None:
        """Wait until all ranks of a launch wait before the step."""
        wait_until(
            lambda: self._all_ranks_say("waiting", step),
            timeout,
            f"all ranks before step {step}",
            self.said,
            every=0.1,
        )

    def end_pause(self, step: int = PAUSE) -> None:
        """Let the ranks train on; later launches do not wait before this step."""
        folder = self.folder / f".pause/{step}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "over").touch()

    def end_pace(self) -> None:
        """Let the ranks train as fast as they can."""
        (self.folder / ".pause").mkdir(exist_ok=True)
        (self.folder / ".pause/pace-over").touch()

    def during_pause(self, step: int, act: Callable[[], object]) -> float:
        """Call `act` while all ranks wait before the step, then let them train on; the time of the
        call."""
        self.wait_for_pause(step)
        event_time = time.time()
        act()
        self.end_pause(step)
        return event_time

    def fail_gpu(self, host: str, step: int = PAUSE) -> None:
        """Let the ranks on this host fail after the pause, with PyTorch's error for a broken GPU."""
        (self.folder / f".pause/{step}/gpu-fails-{host}").touch()

    def end_pause_when_told_to_stop(self, step: int = PAUSE, timeout: float = 90) -> None:
        """Let the ranks train on once each of them has its signal to stop."""
        wait_until(
            lambda: self._all_ranks_say("stopping", step),
            timeout,
            "all ranks told to stop",
            self.said,
            every=0.1,
        )
        self.end_pause(step)

    def _all_ranks_say(self, word: str, step: int) -> bool:
        """Whether each rank has left this file of pause/sitecustomize.py."""
        launches = self.events("launch")
        left = list((self.folder / f".pause/{step}").glob(f"{word}-*"))
        return bool(launches) and len(left) == launches[-1]["world_size"]

    def wait_for_event(self, name: str, count: int = 1, timeout: float = 90) -> dict[str, Any]:
        wait_until(
            lambda: len(self.events(name)) >= count,
            timeout,
            f"{count} x {name}",
            self.said,
            every=0.1,
        )
        return self.events(name)[count - 1]

    def steps_lost(self, event_time: float) -> int:
        """The number of steps that the first launch after the event trains again."""
        again = next(event for event in self.events("init") if event["time"] > event_time)
        before = [line["step"] for line in self.train_lines() if line["time"] < again["time"]]
        return int(max(before) - again["step"])

    def ranks(self) -> list[psutil.Process]:
        """The living rank processes of this run, on all nodes."""
        return rank_processes(self.paths.launches)

    def said(self) -> str:
        """The last words of the run's logs, for a test that waits in vain."""
        logs = sorted(self.paths.logs.glob("*.log")) + sorted(self.folder.parent.glob("*.out"))
        return "\n".join(f"== {log.name}\n{log.read_text()[-600:]}" for log in logs)


def batch_steps_of(job: str) -> list[psutil.Process]:
    """The process that runs the commands of this job, one in each of its starts."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess):
            is_one = "forge.batch_step" in process.cmdline()
            if is_one and process.environ().get("SLURM_JOB_ID") == job:
                found.append(process)
    forks = {process.pid for process in found}
    return [process for process in found if process.ppid() not in forks]


def preempt(cluster: Cluster, run: Progress, step: int) -> float:
    """A job that comes first needs the run's nodes for a moment while the ranks wait before the step;
    the time at which it was submitted."""
    run.wait_for_pause(step)
    hosts = run.events("launch")[-1]["nodes"]
    event_time = time.time()
    cluster.submit(
        *("--partition=high", "--exclusive", "--nodes=2", f"--nodelist={','.join(hosts)}"),
        *("--output=/dev/null", "--wrap=sleep 2"),
    )
    run.end_pause_when_told_to_stop(step)
    return event_time


def lose(cluster: Cluster, name: str) -> None:
    """Cut the power of a node, which Slurm itself would notice after half a minute."""
    cluster.power_cut(name)
    cluster.run("scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=lost")


@dataclass
class JobRun(Progress):
    """`forge train` under sbatch, on two nodes. Its ranks wait before each step of `pauses`."""

    cluster: Cluster
    names: Sequence[str]
    config: Path
    launcher: str = "srun"
    ranks_per_node: int = 1
    pauses: Sequence[int] = (PAUSE,)
    keys: dict[str, Any] = field(default_factory=dict)  # more of machine.yaml
    environment: dict[str, str] = field(default_factory=dict)  # more than Slurm's of the job
    commands: Sequence[str] = ("train",)  # of the job, one after the other
    cwd: Path = REPOSITORY  # where `forge stage` keeps its proof

    @property
    def output(self) -> Path:
        return self.folder.parent / f"{self.folder.name}.out"

    def submit(self, *options: str, nodes: int = 2) -> str:
        """The job's id. It may run on any of the case's nodes."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        file = self.folder.parent / "machine.yaml"
        file.write_text(yaml.safe_dump(machine(self.launcher, **self.keys)))
        others = sorted(set(self.cluster.nodes) - set(self.names))
        where = (
            f"{self.config} --run={self.folder.name} --results={self.folder.parent} --machine={file}"
            f" --nodes=2 --ranks-per-node={self.ranks_per_node}"
        )
        *first, last = (f"python -m forge {command} {where}" for command in self.commands)
        return self.cluster.submit(
            *(f"--nodes={nodes}", f"--ntasks-per-node={self.ranks_per_node}"),
            *("--cpus-per-task=1", "--mem=1800"),
            *("--time=10", "--requeue", "--open-mode=append", f"--output={self.output}"),
            *([f"--exclude={','.join(others)}"] if others else []),
            *options,
            f"--wrap={' && '.join([*first, f'exec {last}'])}",
            cwd=self.cwd,
            env=paused(*self.pauses) | self.environment,
        )

    def wait_for_end(self, job: str, timeout: float = 240) -> dict[str, str]:
        """What Slurm says of the job at its end."""
        ends = "COMPLETED FAILED CANCELLED TIMEOUT NODE_FAIL PREEMPTED"
        return self.cluster.wait_for_state(job, ends, timeout)


@dataclass(frozen=True)
class Uninterrupted:
    """The tiny config trained without any trouble: what every case must end with. Trained on this machine
    outside of Slurm, once for each world size that a case asks for. Several processes may have an
    object for the same results: the others wait for the one that trains."""

    config: Path
    results: Path

    def equals(self, run: Progress) -> None:
        """Weights and every loss on the way are the same to the last bit."""
        [world_size] = {event["world_size"] for event in run.events("launch")}
        alike = self.run(world_size)
        assert run.weights_digest() == alike.weights_digest()
        assert run.losses() == alike.losses()
        assert resume.latest(run.paths).step == GOAL  # type: ignore[union-attr]

    def run(self, world_size: int) -> Progress:
        """The undisturbed run on so many ranks of one node."""
        run = Progress(self.results / f"of-{world_size}")
        self.results.mkdir(parents=True, exist_ok=True)
        with locked(self.results / f"{run.folder.name}.lock"):
            if not run.paths.trained.exists():
                file = self.results / f"{run.folder.name}.yaml"
                file.write_text(yaml.safe_dump(machine("torchrun")))
                where = (f"--run={run.folder.name}", f"--results={self.results}")
                ranks = f"--ranks-per-node={world_size}"
                forge("train", self.config, *where, f"--machine={file}", ranks)
        return run
