"""Threat: events of many kinds, one after the other, that together lose a step, a bit, or a night.

Two projects train at a time, each under `forge submit`, on nodes of which one has a clock that is an hour
ahead; in each, the next event comes once the run trains again. FORGE_STORM_EVENTS: how many in both
together (50); FORGE_STORM_SEED draws their order.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from bench import faults
from forge.checkpoint import resume
from tools.slurm_cluster.cluster import Cluster
from tools.slurm_cluster.machines import ClusterError, wait_until

from .job_run import TINY_CONFIG, Progress, Uninterrupted, lose, paced
from .project import Project
from .test_submit import Submitted

NewProject = Callable[..., Project]
EVENTS = int(os.environ.get("FORGE_STORM_EVENTS") or 50)
SEED = int(os.environ.get("FORGE_STORM_SEED") or 1)
GOAL, INTERVAL = 4000, 40
PACE_SEC = 0.4  # of a step, until the storm is over
TRAINS_AGAIN_SEC = 300.0
ONE_AT_A_TIME = threading.Lock()  # both projects have the same daemons

pytestmark = [pytest.mark.weekly, pytest.mark.timeout(7200, func_only=True)]


@dataclass
class Struck:
    """One project, its run, and the job that trains it now (bench.faults.StruckJob)."""

    own: Submitted
    controller: str
    log: Callable[[str], None]
    hands: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    landed: list[str] = field(default_factory=list)

    @property
    def cluster(self) -> Cluster:
        return self.own.cluster

    @property
    def run(self) -> Progress:
        return self.own.project.run()

    @property
    def job(self) -> str:
        return str(self.run.events("launch")[-1]["job"])

    @property
    def nodes(self) -> list[str]:
        return list(self.run.events("launch")[-1]["nodes"])

    def said(self) -> str:
        return self.own.said()

    def node_is_back(self, name: str) -> None:
        """Nothing of this run is on a node that has booted."""

    def step(self) -> int:
        lines = self.run.train_lines()
        return int(lines[-1]["step"]) if lines else 0

    def trains(self, lines: int) -> bool:
        """Whether living ranks have trained steps since there were so many lines. Not by their times: the
        clock of a node may be wrong."""
        return len(self.run.train_lines()) >= lines + 3 and len(self.run.ranks()) == 2

    def restart(self, act: Callable[[Struck, list[psutil.Process]], faults.Repair]) -> None:
        """A fault that the launch does not survive, and the next launch."""
        launches = len(self.run.events("init"))
        repair = act(self, self.run.ranks())
        try:
            wait_until(
                lambda: len(self.run.events("init")) > launches,
                TRAINS_AGAIN_SEC,
                "the next launch",
                self.said,
                every=0.5,
            )
        finally:
            repair()
        self.wait()

    def wait(self) -> None:
        lines = len(self.run.train_lines())
        wait_until(lambda: self.trains(lines), TRAINS_AGAIN_SEC, "retraining", self.said, every=0.5)

    def go_on(self, act: Callable[[Struck], object]) -> None:
        """An event that training survives, or does not notice."""
        act(self)
        self.wait()


def repaired(act: Callable[[Struck], object], undo: Callable[[Struck], object] | None = None):
    """A fault as those of bench.faults."""

    def strike(struck: Struck, _ranks: list[psutil.Process]) -> faults.Repair:
        act(struck)
        return partial(undo, struck) if undo else faults.nothing

    return strike


def lose_node(struck: Struck, _ranks: list[psutil.Process]) -> faults.Repair:
    name = struck.nodes[-1]
    lose(struck.cluster, name)
    return partial(struck.cluster.boot, name)


def corrupt_newest(struck: Struck, ranks: list[psutil.Process]) -> faults.Repair:
    """A flipped byte in the newest checkpoint, and a lost rank."""
    newest = resume.latest(struck.run.paths)
    assert newest
    file = sorted(newest.folder.glob("*.distcp"))[-1]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return faults.kill_rank(struck, ranks)


def kill_node_agent(struck: Struck, ranks: list[psutil.Process]) -> faults.Repair:
    """kill -9 of the process by which stage or preflight of the next start looks at a node."""
    job = struck.job
    faults.requeue(struck, ranks)
    wait_until(lambda: not struck.run.ranks(), 60, "the end of the ranks", every=0.05)
    found: list[psutil.Process] = []

    def is_there() -> bool:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                is_one = "forge.node_agent" in process.cmdline() and "srun" not in process.name()
                if is_one and process.environ().get("SLURM_JOB_ID") == job:
                    found.append(process)
        return bool(found)

    wait_until(is_there, 120, f"a node agent of job {job}", struck.said, every=0.05)
    found[-1].kill()
    return faults.nothing


def suspend(struck: Struck) -> None:
    job = struck.job
    with ONE_AT_A_TIME:  # resumed while slurmctld is there
        struck.cluster.run("scontrol", "suspend", job)
        time.sleep(25)
        struck.cluster.run("scontrol", "resume", job)


def slow(struck: Struck) -> None:
    name = struck.nodes[-1]
    struck.cluster.slow_link(name, 1)
    time.sleep(15)
    struck.cluster.full_speed(name)


def away(*daemons: str) -> Callable[[Struck], None]:
    def act(struck: Struck) -> None:
        with ONE_AT_A_TIME:
            for name in daemons:
                struck.cluster.stop_daemon(name)
            time.sleep(12)
            for name in reversed(daemons):
                struck.cluster.start_daemon(name)

    return act


def warn(struck: Struck) -> None:
    """What Slurm sends the steps of the job before its time limit."""
    struck.cluster.run("scancel", "--signal=USR1", struck.job)


def kill_snakemake_of_controller(struck: Struck) -> None:
    """kill -9; the training job has none."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            is_one = process.cmdline()[1:3] == ["-m", "snakemake"]
            here = is_one and process.cwd() == str(struck.own.project.folder)
            if here:
                process.kill()
                return
    raise ClusterError("no Snakemake of the controller")


def requeue_controller(struck: Struck) -> None:
    struck.cluster.run("scontrol", "requeue", struck.controller)
    time.sleep(15)


def ask(struck: Struck) -> None:
    """What people look at while a run trains."""
    for words in (("status",), ("show", "results/base"), ("logs", "results/base"), ("compare",)):
        done = struck.own.run(*words)
        assert done.returncode == 0, (words, done.stdout, done.stderr)


def validate_beside(struck: Struck) -> None:
    """Another command that checks a checkpoint, exports one and starts the run again, while it trains."""
    done = struck.own.run("validate", "results/base", "--validate.depth=digests")
    assert done.returncode in (0, 69), done.stderr
    project = struck.own.project
    target = project.folder / f"export-{time.monotonic_ns()}"
    assert struck.own.run("export", "results/base", f"--to={target}").returncode == 0
    again = struck.own.run("submit", *struck.own.line())
    assert again.returncode == 69 and "forge submit --stop" in again.stderr, again.stderr


def edit_config(struck: Struck) -> None:
    """For the next experiment: the run keeps what was submitted."""
    path = struck.own.project.folder / "config/config.yaml"
    values = yaml.safe_load(path.read_text())
    values["train"]["lr"] = values["train"].get("lr", 0.001) * 1.5
    path.write_text(yaml.safe_dump(values))


RESTARTS: dict[str, Callable[[Struck, list[psutil.Process]], faults.Repair]] = {
    "preempted": faults.preempt,
    "rank killed": faults.kill_rank,
    "rank stopped": faults.hang_rank,
    "requeued by hand": faults.requeue,
    "power of a node": lose_node,
    "cable of a node": faults.cut_cable,
    "warned of the time limit": repaired(warn),
    "byte flipped": corrupt_newest,
    "node agent killed": kill_node_agent,
}
GOES_ON: dict[str, Callable[[Struck], object]] = {
    "suspended for 25 s": suspend,
    "1 Mbit/s for 15 s": slow,
    "slurmctld away": away("slurmctld"),
    "both daemons away": away("slurmctld", "slurmdbd"),
    "controller's Snakemake killed": kill_snakemake_of_controller,
    "controller requeued": requeue_controller,
    "looked at": ask,
    "validated, exported, submitted again": validate_beside,
    "config edited": edit_config,
}


def order(count: int, seed: int) -> list[str]:
    """Each kind as often as any other, in random order."""
    kinds = [*RESTARTS, *GOES_ON]
    drawn = [kinds[number % len(kinds)] for number in range(count)]
    random.Random(seed).shuffle(drawn)
    return drawn


@pytest.fixture
def twin(shared_folder: Path, tiny_config: Path) -> Uninterrupted:
    """The same training without an event and without pace."""
    config = shared_folder / "twin.yaml"
    config.write_text(yaml.safe_dump(yaml.safe_load(tiny_config.read_text()) | values()))
    return Uninterrupted(config, shared_folder / "twin")


def values() -> dict[str, Any]:
    train = {"max_steps": GOAL, "decay_steps": GOAL, "checkpoint_every": INTERVAL}
    return {"train": {**TINY_CONFIG["train"], **train, "eval_every": 1000}}


def storm(struck: Struck, kinds: list[str]) -> None:
    for kind in kinds:
        step, began = struck.step(), time.time()
        try:
            if kind in RESTARTS:
                struck.restart(RESTARTS[kind])
            else:
                struck.go_on(GOES_ON[kind])
        except (ClusterError, AssertionError, IndexError, psutil.NoSuchProcess) as err:
            # Missed where the event of the other project came first; else a person would be needed.
            where = struck.missed if trains_soon(struck) else struck.hands
            where.append(f"{kind} at step {step}: {err}")
            struck.log(f"{'MISSED' if where is struck.missed else 'HAND'}: {where[-1][:1500]}")
            if where is struck.hands:
                return
        else:
            struck.landed.append(kind)
            struck.log(f"{kind}: step {step} -> {struck.step()}, {time.time() - began:.0f} s")


def trains_soon(struck: Struck) -> bool:
    with contextlib.suppress(ClusterError):
        struck.wait()
        return True
    return False


def steps_again(run: Progress) -> int:
    """How many steps were trained more than once."""
    lines = run.train_lines()
    return len(lines) - len({line["step"] for line in lines})


@contextlib.contextmanager
def lines_to(path: Path) -> Iterator[Callable[[str], None]]:
    with open(path, "a", buffering=1) as file:
        yield lambda line: print(time.strftime("%H:%M:%S"), line, file=file)


def test_two_submitted_projects_end_as_undisturbed_ones_and_need_nobody(
    new_project: NewProject, exclusive_cluster: Cluster, shared_folder: Path, twin: Uninterrupted
) -> None:
    nodes = exclusive_cluster.nodes
    log = Path(os.environ.get("FORGE_STORM_LOG") or shared_folder / "storm.log")
    with lines_to(log) as say:
        both = []
        for name in ("north", "south"):
            project = new_project(
                name=name,
                on=len(nodes),
                values=values(),
                train_run={"slurm_partition": "low", "runtime": 30},
            )
            own = Submitted(project, partition="low")
            clock = {"FORGE_TEST_CLOCK": f"{nodes[1]}=3600"}
            controller = own.submit(env=paced(PACE_SEC) | clock)
            both.append(
                Struck(own, controller, partial(lambda who, line: say(f"{who} {line}"), name))
            )
        for struck in both:
            wait_until(lambda: struck.trains(0), 300, "training", struck.said, every=0.5)  # noqa: B023
        kinds = order(EVENTS, SEED)
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(storm, both[i], kinds[i::2]) for i in (0, 1)]:
                done.result()
        for struck in both:
            struck.run.end_pace()
        for struck in both:
            state = struck.own.wait_for_end(struck.controller, timeout=900)
            run = struck.run
            struck.log(
                f"{state}: {len(struck.landed)} events, {len(struck.missed)} missed,"
                f" {len(struck.hands)} hands, {len(run.events('launch'))} launches,"
                f" {steps_again(run)} of {GOAL} steps retrained"
            )
            assert (state, struck.hands) == ("COMPLETED", [])
            alike = twin.run(2)
            assert run.weights_digest() == alike.weights_digest()
            assert run.losses() == alike.losses()
            struck.log(f"weights and losses equal the undisturbed run's: {run.weights_digest()}")
    assert sum(len(struck.landed) for struck in both) >= 0.9 * EVENTS, log.read_text()
