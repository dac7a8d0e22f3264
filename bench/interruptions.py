"""A run of Forge on the test cluster that faults interrupt, each until the next new step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import psutil
import yaml

from bench import faults
from bench.pipeline import make_project
from bench.recovery_split import Seen, Split, longest_step, split
from forge.core import events, json_lines
from forge.core.files import read_object_or_empty
from forge.core.paths import RunPaths
from forge.launch.launcher import MAX_RESTARTS_AFTER_LOSS
from forge.trainer import metrics
from tools.slurm_cluster.cluster import Cluster
from tools.slurm_cluster.inside import Inside
from tools.slurm_cluster.machines import ClusterError, wait_until
from tools.slurm_cluster.rank_processes import rank_processes

NODES = 2
FABRIC_SEC = 20  # after which ranks notice that a peer is silent
LONGEST_SEC = 240.0
LOOK_SEC = 0.02


@dataclass
class LabRun:
    """A run that the workflow trains on the test cluster, for as long as it is wanted."""

    cluster: Cluster
    folder: Path  # of the project
    ranks_per_node: int
    command: Inside

    @classmethod
    def start(cls, cluster: Cluster, folder: Path, partition: str, ranks_per_node: int) -> LabRun:
        make_project(
            folder,
            1_000_000,
            train={"log_every": 1, "eval_every": 10**6, "checkpoint_every": 200, "batch_size": 8},
            train_run={
                **{"slurm_partition": partition, "nodes": NODES, "runtime": 30},
                "tasks_per_node": ranks_per_node,
            },
        )
        machine = folder / "profiles/slurm-cpu/machine.yaml"
        values = yaml.safe_load(machine.read_text())
        values |= {"stop_grace_sec": 30, "fabric": {"timeout_sec": FABRIC_SEC}}
        machine.write_text(yaml.safe_dump(values))
        # Its output into a file: a pipe that nobody reads would stop it.
        line = "exec snakemake --profile profiles/slurm-cpu train > snakemake.out 2>&1"
        return cls(cluster, folder, ranks_per_node, cluster.popen("bash", "-c", line, cwd=folder))

    @property
    def num_ranks(self) -> int:
        return NODES * self.ranks_per_node

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.folder / "results/base")

    @property
    def log(self) -> list[events.Event]:
        return events.read(self.paths.events) if self.paths.events.exists() else []

    @property
    def lines(self) -> Sequence[metrics.Line]:
        return metrics.read(self.paths.metrics) if self.paths.metrics.exists() else []

    @property
    def launch(self) -> events.Launch:
        found = events.last(self.log, events.Launch)
        assert isinstance(found, events.Launch)
        return found

    @property
    def job(self) -> str:
        assert self.launch.job
        return self.launch.job

    @property
    def nodes(self) -> list[str]:
        return self.launch.nodes

    def node_is_back(self, name: str) -> None:
        """The next launch may use it."""
        self.cluster.wait_until_idle([name])
        self.paths.bad_nodes.unlink(missing_ok=True)

    def wait_until_steady(self) -> None:
        """Until this launch has all of its ranks, and has saved a checkpoint by its own interval."""

        def saved() -> bool:
            self.refuse_end()
            log = self.log
            launch = events.last(log, events.Launch)
            save = events.last(log, events.Save)
            return bool(launch and save and save.time > launch.time)

        wait_until(saved, LONGEST_SEC, "a checkpoint of the new launch", self.said, every=0.2)
        wait_until(
            lambda: len(rank_processes(self.paths.launches)) == self.num_ranks,
            10,
            "all ranks",
            self.said,
        )

    def refuse_end(self) -> None:
        """ClusterError once the workflow has ended: nothing comes after that."""
        if self.command.poll() is not None:
            raise ClusterError(f"the workflow has ended\n{self.said()}")

    def said(self) -> str:
        """The last lines of the workflow and of the launches, for an error."""
        logs = [self.folder / "snakemake.out", *sorted(self.paths.logs.glob("*.log"))]
        return "\n".join(f"== {log.name}\n{log.read_text()[-800:]}" for log in logs if log.exists())

    def end(self) -> None:
        """Cancel its job, and end the workflow."""
        with contextlib.suppress(ClusterError, AssertionError):
            self.cluster.run("scancel", self.job)
        self.command.kill_group()


# --- the events -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Interruption:
    """A kind of event. what: for the table. is_loss: ranks are lost in an allocation that stays, which
    `forge train` bears twice. ends_launch: the ranks do not train on."""

    what: str
    fault: faults.Fault
    is_loss: bool = False
    ends_launch: bool = True
    partition: str = "main"


EVENTS = {
    "killed-rank": Interruption("SIGKILL of a rank", faults.kill_rank, is_loss=True),
    "hung-rank": Interruption("SIGSTOP of a rank", faults.hang_rank, is_loss=True),
    "requeue": Interruption("scontrol requeue", faults.requeue),
    "preemption": Interruption("preemption, requeued by Slurm", faults.preempt, partition="low"),
    "time-limit": Interruption("time limit, announced by SIGUSR1", faults.reach_time_limit),
    "power-cut": Interruption("a node loses its power", faults.cut_power),
    "cable": Interruption("a node loses its network", faults.cut_cable),
    "slurmctld": Interruption(
        f"slurmctld away for {faults.AWAY_SEC:g} s", faults.stop_slurmctld, ends_launch=False
    ),
}


# --- one round ------------------------------------------------------------------------------------


class Rounds:
    """Rounds of one event on one run."""

    def __init__(self, run: LabRun, event: Interruption) -> None:
        self.run, self.event = run, event
        self._losses = 0  # since the job's last start

    def next(self) -> Split:
        """One round, from steps as usual to the next new step. Raises ClusterError where the fault was
        not seen to happen, or no step follows."""
        run = self.run
        run.wait_until_steady()
        if self.event.is_loss and self._losses == MAX_RESTARTS_AFTER_LOSS:
            self._requeue_first()
        self._losses += 1
        ranks = rank_processes(run.paths.launches)
        old, restarts = run.launch, faults.restarts(run)
        fault_at = time.time()
        if not self.event.ends_launch:
            self.event.fault(run, ranks)()
            return longest_step(fault_at, time.time(), run.lines)
        with ThreadPoolExecutor(1) as beside:  # ranks may end before the fault is seen by Slurm
            fault = beside.submit(self.event.fault, run, ranks)
            seen = self._watch(Seen(fault_at), old, ranks, fault)
            repair = fault.result()
        if faults.restarts(run) > restarts:
            start = datetime.fromisoformat(run.cluster.job(run.job)["StartTime"]).timestamp()
            seen = replace(seen, job_start=start)
        found = split(seen, run.log, run.lines)
        assert found is not None
        repair()
        return found

    def _requeue_first(self) -> None:
        """A new start of the job, which bears losses again. Not a round."""
        faults.requeue(self.run, [])
        launch = self.run.launch.launch
        wait_until(
            lambda: self.run.launch.launch != launch,
            LONGEST_SEC,
            "a new start",
            self.run.said,
            every=0.2,
        )
        self.run.wait_until_steady()
        self._losses = 0

    def _watch(
        self,
        seen: Seen,
        old: events.Launch,
        ranks: list[psutil.Process],
        fault: Future[faults.Repair],
    ) -> Seen:
        """What is to be seen until the first new step. Raises ClusterError after LONGEST_SEC, and where
        the fault did not happen."""
        run, folder = self.run, self.run.paths.launches
        record = ended = None
        processes: dict[str, float] = {}
        before = _newest(run.paths).step
        end = time.monotonic() + LONGEST_SEC
        while True:
            now = time.time()
            if record is None and _has_failed(folder / old.launch):
                record = now
            if ended is None and all(map(faults.is_gone, ranks)):
                ended, before = now, _newest(run.paths).step
            for launch in folder.glob("*/"):
                if launch.name not in (old.launch, *processes) and _pids(launch) == run.num_ranks:
                    processes[launch.name] = now
            newest = _newest(run.paths)
            if newest.step > before and newest.launch != old.launch:
                return Seen(seen.fault, record, ended, None, processes)
            run.refuse_end()
            if fault.done():
                fault.result()
            if time.monotonic() > end:
                raise ClusterError(f"no step after {self.event.what}\n{run.said()}")
            time.sleep(LOOK_SEC)


def _has_failed(launch: Path) -> bool:
    """Whether a rank of this launch has recorded a failure, or that it waits in vain."""
    found = [*launch.glob("rank-*.json"), *launch.glob("rank-*.provisional")]
    return any(read_object_or_empty(path).get("status") in ("failed", "lost") for path in found)


def _pids(launch: Path) -> int:
    return len([*launch.glob("rank-*.pid")])


@dataclass(frozen=True)
class _Newest:
    """The newest step in the metrics."""

    launch: str
    step: int


def _newest(paths: RunPaths) -> _Newest:
    lines, _ = json_lines.last_lines(paths.metrics, 4096)
    for line in reversed(lines):
        value = json_lines.parse(line)
        if value and value.get("kind") == "train":
            return _Newest(value["launch"], value["step"])
    return _Newest("", 0)
