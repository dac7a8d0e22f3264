"""Forge: its workflow around the paced program, and around its own trainer."""

from __future__ import annotations

import contextlib
import re
import shutil
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import yaml

from bench.pipeline import make_project
from bench.storm import chain
from bench.storm.contender import PACED, Contender, Layout
from bench.storm.raw import Steps
from forge.core import events
from forge.core.paths import RunPaths
from forge.trainer import metrics
from tools.slurm_cluster.cluster import Cluster
from tools.slurm_cluster.inside import Inside
from tools.slurm_cluster.machines import ClusterError
from tools.slurm_cluster.rank_processes import rank_processes

GOAL = 10**6  # steps, which no storm reaches
# Before the time limit. As for silent peers, hours are minutes here: of 120 s, the default, all that
# a save of a second does not need would be training that a storm of minutes lacks.
WARN_SEC = 60
STOP_SEC = 30  # Forge's `grace_sec`: less than the partition's grace period


class Workflow(Contender):
    """`snakemake --profile … train` on the login node, with the profile slurm-cpu as it is shipped. A
    person's hand is the same command again."""

    packages = ("torch", "forge", "snakemake", "snakemake-executor-plugin-slurm")

    def __init__(self, cluster: Cluster, folder: Path, layout: Layout) -> None:
        super().__init__(cluster, folder, layout)
        self.project = folder / "project"
        self._command: Inside | None = None

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.project / "results/base")

    @property
    def checkpoints(self) -> Path:
        return self.paths.checkpoints

    def prepare(self) -> None:
        super().prepare()
        own = self.layout
        # The profile adds 20 minutes for stage and preflight.
        allocation = {"slurm_partition": "low", "nodes": own.nodes, "tasks_per_node": 1}
        make_project(
            self.project,
            GOAL,
            train=self.train_keys(),
            train_run={**allocation, "cpus_per_task": 2, "runtime": own.limit_minutes - 20},
        )
        machine = self.project / "profiles/slurm-cpu/machine.yaml"
        values = yaml.safe_load(machine.read_text())
        values |= {
            **{"stop_grace_sec": STOP_SEC, "fabric": {"timeout_sec": own.peer_timeout_sec}},
            "slurm": {"warn_sec": WARN_SEC},
        }
        machine.write_text(yaml.safe_dump(values))

    def train_keys(self) -> Mapping[str, object]:
        """Keys of the config's section `train` for Forge's own trainer."""
        return {}

    def start(self) -> None:
        # Its output into a file: a pipe that nobody reads would stop it.
        line = "exec snakemake --profile profiles/slurm-cpu train >> snakemake.out 2>&1"
        self._command = self.cluster.popen("bash", "-c", line, cwd=self.project)

    @property
    def job(self) -> str:
        log = events.read(self.paths.events) if self.paths.events.exists() else []
        launch = events.last(log, events.Launch)
        submitted = re.findall(
            r"'?train_run'?.* SLURM jobid (\d+)|SLURM jobid (\d+)", self._output()
        )
        newest = max((int(a or b) for a, b in submitted), default=0)
        found = max(newest, int(launch.job or 0) if isinstance(launch, events.Launch) else 0)
        if not found:
            raise ClusterError("the workflow has not submitted the job that trains")
        return str(found)

    def _output(self) -> str:
        path = self.project / "snakemake.out"
        return path.read_text() if path.exists() else ""

    def has_ended(self) -> bool:
        return self._command is not None and self._command.poll() is not None

    def said(self) -> str:
        logs = [self.project / "snakemake.out", *sorted(self.paths.logs.glob("*.log"))]
        return "\n".join(f"== {log.name}\n{log.read_text()[-800:]}" for log in logs if log.exists())

    def end(self) -> None:
        super().end()
        if self._command is not None:
            self._command.kill_group()


class ForgeProgram(Workflow):
    """Forge around the paced program, which saves at SIGTERM and writes heartbeats (docs/programs.md)."""

    name = "forge"
    what = "Forge around the same program"

    def prepare(self) -> None:
        super().prepare()
        source = self.folder / "source"
        source.mkdir()
        for path in (PACED, Path(chain.__file__)):
            shutil.copy(path, source)
        (self.project / "config/config.yaml").write_text(yaml.safe_dump(self._config(source)))

    def _config(self, source: Path) -> dict[str, Any]:
        own = self.layout
        options = ["--save-on-sigterm", "--keep=0", "--checkpoints={checkpoints}"]
        return {
            "data": "data",
            "program": {
                "command": ["python", PACED.name, *self.options(), *options, "--resume={resume}"],
                "source": str(source),
                "goal": GOAL,
                "checkpoints": {"pattern": "checkpoint-{step}", "complete": ["rank{rank}.pt"]},
                "keep_last": 3,
                "stop": {"signal": "SIGTERM", "grace_sec": STOP_SEC},
                # Of the ranks, peers that are silent are noticed after the same time.
                "heartbeat": {"timeout_sec": 3 * own.peer_timeout_sec},
            },
        }


class ForgeTrainer(Workflow):
    """Forge's own trainer on a tiny model, which is not paced: it is scored by the mean of its own steps,
    and the losses of steps that were trained twice tell whether both were the same."""

    name = "forge-trainer"
    what = "Forge's own trainer, not paced"
    is_ranked = False
    SAVED_EVERY = 100  # steps

    def train_keys(self) -> Mapping[str, object]:
        # A batch that is large for the model: a raw file has the time of every step.
        batch = {"batch_size": 16, "checkpoint_every": self.SAVED_EVERY}
        return {"log_every": 1, "eval_every": GOAL, **batch}

    def pace(self, launches: Sequence[Steps]) -> tuple[float, float]:
        """By the mean of its own steps, without the first one of each launch. Not by their median: four
        ranks that share two cores take 0.1 s for one step and 0.4 s for another."""
        every = [after - before for one in launches for before, after in pairwise(one.times)]
        step_sec = statistics.mean(every) if every else self.layout.step_sec
        return step_sec, self.SAVED_EVERY * step_sec

    @property
    def step_log(self) -> Path:
        return self.paths.metrics

    def ranks(self) -> list[psutil.Process]:
        return sorted(rank_processes(self.paths.launches), key=_rank)

    def launches(self, begin: float) -> list[Steps]:
        """A step that had another loss before is wrong."""
        lines = metrics.read(self.paths.metrics) if self.paths.metrics.exists() else []
        found: dict[str, list[metrics.TrainLine]] = {}
        for line in lines:
            if isinstance(line, metrics.TrainLine):
                found.setdefault(line.launch, []).append(line)
        losses: dict[int, float | None] = {}
        for line in (line for one in found.values() for line in one):
            losses.setdefault(line.step, line.loss)
        return [
            Steps(
                launch=name,
                start=one[0].step - 1,
                begin=round(one[0].time - begin, 2),
                times=[round(line.time - begin, 2) for line in one],
                wrong_from=min((x.step for x in one if losses[x.step] != x.loss), default=None),
            )
            for name, one in found.items()
        ]


def _rank(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error, ValueError):
        return int(process.environ().get("RANK") or process.environ().get("SLURM_PROCID") or 0)
    return 0
