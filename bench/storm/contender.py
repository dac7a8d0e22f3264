"""What a contender is: a way to keep the paced program training on the test cluster."""

from __future__ import annotations

import contextlib
import shlex
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

import psutil

from bench.storm import environments, record
from bench.storm.raw import Steps
from tools.slurm_cluster.cluster import Cluster
from tools.slurm_cluster.machines import ClusterError

PACED = Path(__file__).with_name("paced.py")
# Of a job that Slurm will not start again by itself.
ENDS = "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED TIMEOUT"


@dataclass(frozen=True)
class Layout:
    """What every contender gets: nodes with one rank each, and how the paced program trains."""

    nodes: int = 4
    spare_nodes: int = 1
    """Nodes of the cluster beyond those. Whether a job asks for them is the contender's choice."""
    step_sec: float = 0.5
    save_every_sec: float = 30.0
    mib: int = 64
    """Of a checkpoint, a rank."""
    peer_timeout_sec: float = 20.0
    """After which a rank gives up waiting for a peer that is silent."""
    grace_sec: int = 60
    """Between SIGTERM and SIGKILL of a preempted job."""
    limit_minutes: int = 60
    """Time limit of a job, beyond the storm: events bring it near."""


QUICK = Layout(nodes=2, save_every_sec=5.0, mib=1)


class Contender(ABC):
    """One way to keep a program training. An object is for one storm, in a folder of its own that all
    machines of the cluster see. Has what bench.faults asks of a StruckJob."""

    name: ClassVar[str]
    """In names of raw files and on the command line."""
    what: ClassVar[str]
    """For the table: what a person uses, in a few words."""
    script_name: ClassVar[str] = PACED.name
    """Of the program that ranks run; they get --folder=FOLDER."""
    is_ranked: ClassVar[bool] = True
    """Whether its program is the paced one, so that its steps compare with those of the others."""
    is_struck: ClassVar[bool] = True
    """Whether the events of the trace hit it."""
    packages: ClassVar[tuple[str, ...]] = ("torch",)
    """Whose versions are recorded."""
    environment: ClassVar[str] = ""
    """Of bench.storm.environments; "": that of Forge."""

    def __init__(self, cluster: Cluster, folder: Path, layout: Layout) -> None:
        self.cluster, self.folder, self.layout = cluster, folder, layout

    # ------------------------------------------------------------------ what a contender has to say

    @abstractmethod
    def start(self) -> None:
        """Submit it, as a person does: at the beginning, and each time after it has ended for good."""

    @property
    @abstractmethod
    def job(self) -> str:
        """Slurm's id of the job that trains now, or will. Raises ClusterError while there is none."""

    # ------------------------------------------------------------------ what most have in common

    @classmethod
    def why_not(cls) -> str | None:
        """Why it cannot run on this machine, for the table; None if it can."""
        return environments.why_not(cls.environment) if cls.environment else None

    def versions(self) -> dict[str, str]:
        if self.environment:
            return environments.versions(self.environment)
        return {package: version(package) for package in self.packages}

    def prepare(self) -> None:
        """Make what it needs in its folder, before the first start."""
        self.folder.mkdir(parents=True)

    def has_ended(self) -> bool:
        """Whether nothing will start it again but a person."""
        return self.cluster.job(self.job)["JobState"] in ENDS.split()

    @property
    def nodes(self) -> list[str]:
        """Those of its job; none while it waits in the queue."""
        names = self.cluster.job(self.job)["NodeList"]
        if names == "(null)":
            return []
        return self.cluster.run("scontrol", "show", "hostnames", names).stdout.split()

    def ranks(self) -> list[psutil.Process]:
        """The living processes of the paced program, by rank, on all nodes."""
        found = []
        psutil.process_iter.cache_clear()  # a pid may be another process than at the last call
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess):
                words = [word for word in process.cmdline()[1:] if word != "-u"]
                if self.is_rank(words) and process.status() != psutil.STATUS_ZOMBIE:
                    own = process.environ()
                    rank = int(own.get("RANK") or own.get("SLURM_PROCID") or "0")
                    found.append((rank, process.pid, process))
        return [process for *_, process in sorted(found)]

    def is_rank(self, words: list[str]) -> bool:
        """Whether Python was started with these words as a rank of this contender."""
        # Not a launcher, which has the same words behind others.
        is_script = bool(words) and Path(words[0]).name == self.script_name
        return is_script and f"--folder={self.folder}" in words

    @property
    def step_log(self) -> Path:
        """The file to which rank 0 of the paced program writes."""
        return self.folder / "steps.jsonl"

    def launches(self, begin: float) -> list[Steps]:
        """The steps of each launch, read after the storm. begin: of it, in seconds since the epoch."""
        return record.launches(self.step_log, self.layout.nodes, begin)

    def samples(self, begin: float) -> list[tuple[float, int]]:
        """(time, new distinct samples), of a program whose steps may lose samples; else empty."""
        return []

    def pace(self, launches: Sequence[Steps]) -> tuple[float, float]:
        """Seconds of an undisturbed step, and of steps between two checkpoints."""
        return self.layout.step_sec, self.layout.save_every_sec

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def remove_newest_checkpoint(self) -> None:
        """What a person does when a start after another one has trained nothing."""
        found = self.checkpoints.glob("checkpoint-*")
        steps = {int(p.name.rpartition("-")[2]): p for p in found if p.name[-1].isdecimal()}
        if steps:
            shutil.rmtree(steps[max(steps)], ignore_errors=True)

    def node_is_back(self, name: str) -> None:
        """A node that a fault took has booted again. Most have nothing to do: Slurm uses it by itself."""
        return

    def said(self) -> str:
        """The last lines of its logs, for an error."""
        logs = sorted(self.folder.glob("*.out"))
        return "\n".join(f"== {log.name}\n{log.read_text()[-1500:]}" for log in logs)

    def end(self) -> None:
        """Stop it for good, after the storm."""
        with contextlib.suppress(ClusterError):
            self.cluster.run("scancel", self.job)

    def options(self) -> list[str]:
        """Those of the paced program that are the same for every contender."""
        own = self.layout
        return [
            f"--folder={self.folder}",
            *(f"--step-sec={own.step_sec:g}", f"--save-every-sec={own.save_every_sec:g}"),
            *(f"--mib={own.mib}", f"--timeout-sec={own.peer_timeout_sec:g}"),
        ]

    @property
    def script_path(self) -> Path:
        return PACED.with_name(self.script_name)

    def program(self, *more: str) -> str:
        """The program and its options as words of a shell; a launcher or a Python comes before them."""
        return shlex.join([str(self.script_path), *self.options(), *more])


class SbatchContender(Contender):
    """One sbatch script."""

    sbatch_options: ClassVar[tuple[str, ...]] = ("--requeue",)

    def __init__(self, cluster: Cluster, folder: Path, layout: Layout) -> None:
        super().__init__(cluster, folder, layout)
        self._job = ""

    @abstractmethod
    def script(self) -> str:
        """The lines of the script below those for Slurm."""

    def prepare(self) -> None:
        super().prepare()
        lines = ["#!/bin/bash", "export OMP_NUM_THREADS=1", self.script()]
        (self.folder / "job.sh").write_text("\n".join(lines) + "\n")

    def start(self) -> None:
        self._job = self.cluster.submit(
            *("--partition=low", f"--nodes={self.layout.nodes}", "--ntasks-per-node=1"),
            *("--cpus-per-task=2", "--mem=1800", f"--time={self.layout.limit_minutes}"),
            *("--open-mode=append", "--output=job.out", *self.sbatch_options, "job.sh"),
            cwd=self.folder,
        )

    @property
    def job(self) -> str:
        if not self._job:
            raise ClusterError(f"{self.name} has not been submitted")
        return self._job
