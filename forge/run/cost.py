"""Cost of the runs that a command will train, before their jobs wait: GPU-hours and node-hours."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forge.core.config import ResolvedConfig
from forge.core.errors import ConfigError
from forge.core.machine import Machine
from forge.core.terminal import duration, gpu_and_node_hours, hours
from forge.hosts.allocation import Allocation, gpus_per_node
from forge.run.programs import program_of
from forge.slurm import jobs

MAX_NAMED = 8  # runs in an error message


@dataclass(frozen=True)
class Cost:
    """The allocation of a run, and the time that it is held."""

    run: str
    nodes: int  # spare ones too
    gpus: int  # of each node
    limit_sec: float  # time limit of its job
    left_sec: float | None  # estimate up to the goal; None without one

    @property
    def place(self) -> str:
        nodes = f"{self.nodes} node{'s' * (self.nodes != 1)}"
        return f"{nodes} x {self.gpus} GPU{'s' * (self.gpus != 1)}" if self.gpus else nodes

    @property
    def seconds(self) -> float:
        """The time that slurm.max_gpu_hours counts."""
        return self.limit_sec if self.left_sec is None else self.left_sec

    @property
    def gpu_hours(self) -> float:
        """GPU-hours that slurm.max_gpu_hours is compared with."""
        return self.nodes * self.gpus * self.seconds / 3600

    @property
    def reason(self) -> str:
        """Words for how its GPU-hours add up."""
        time = duration(self.seconds, precise=True)
        if self.left_sec is None:
            return f"time limit of {time} on {self.place}"
        return f"estimate of {time} up to its goal on {self.place}"


def costs(
    runs: Mapping[str, ResolvedConfig], allocation: Allocation, due: Iterable[Any]
) -> list[Cost]:
    """The cost of each run that will be trained, in the order of the sheet. due: Snakemake's jobs that
    will run."""
    of_run: dict[str, list[Any]] = defaultdict(list)
    trained = set()
    for job in due:
        if job.rule.name in jobs.ALLOCATION_RULES:
            of_run[job.wildcards.run].append(job)
        if job.rule.name == jobs.TRAIN_RULE:
            trained.add(job.wildcards.run)
    return [_cost(runs[name], allocation, of_run[name]) for name in runs if name in trained]


def _cost(config: ResolvedConfig, allocation: Allocation, members: Sequence[Any]) -> Cost:
    """members: the run's jobs that share an allocation. It has the nodes of the one that asks for most
    (the profile's nodes for training are without spare ones), and their time limits in sum."""
    layout, machine = allocation.layout(config.run), allocation.machine
    gpus = gpus_per_node({"gres": members[0].resources.get("gres") or ""}) or 0
    minutes = (job.resources.get("runtime") for job in members)
    return Cost(
        run=config.run,
        nodes=max(job.resources.get("nodes") or 1 for job in members),
        gpus=gpus,
        limit_sec=60 * sum(number for number in minutes if isinstance(number, int)),
        left_sec=program_of(config).seconds_left(machine, layout) if gpus else None,
    )


def summary(costs: Sequence[Cost], machine: Machine) -> str:
    """One line about these runs; "" for none."""
    if not costs:
        return ""
    number, of = len(costs), "its" if len(costs) == 1 else "their"
    places = Counter(cost.place for cost in costs)
    each = [f"{count} on {place}" for place, count in places.items()]
    where = f"on {costs[0].place}" if len(places) == 1 else f"({', '.join(each)})"
    where += " (spare nodes included)" * bool(machine.preflight.spare_nodes)
    limits = _amount([(cost, cost.limit_sec) for cost in costs])
    line = (
        f"{number} run{'s' * (number > 1)} to train {where}: at most {limits} by {of} time"
        f" limit{'s' * (number > 1)}, as much again with each requeue"
    )
    known = [(cost, cost.left_sec) for cost in costs if cost.left_sec is not None]
    if not known:
        return line
    goals = (
        f"{of} goal{'s' * (number > 1)}" if len(known) == number else f"the goals of {len(known)}"
    )
    return (
        f"{line}; about {_amount(known)} up to {goals} by forge plan's estimate for {machine.gpu}"
        " GPUs, without restarts"
    )


def _amount(held: Sequence[tuple[Cost, float]]) -> str:
    """GPU-hours and node-hours of allocations that are held for so many seconds."""
    nodes = sum(cost.nodes * seconds for cost, seconds in held) / 3600
    gpus = sum(cost.nodes * cost.gpus * seconds for cost, seconds in held) / 3600
    return gpu_and_node_hours(gpus if any(cost.gpus for cost, _ in held) else None, nodes)


def refuse_more(costs: Sequence[Cost], machine: Machine, file: str) -> None:
    """ConfigError where these runs need more than slurm.max_gpu_hours. file: the machine's."""
    most, needed = machine.slurm.max_gpu_hours, sum(cost.gpu_hours for cost in costs)
    if most is None or needed <= most:
        return
    largest = sorted(costs, key=lambda cost: -cost.gpu_hours)
    named = [f"{cost.run} {hours(cost.gpu_hours)} ({cost.reason})" for cost in largest[:MAX_NAMED]]
    more = [f"{len(largest) - MAX_NAMED} more"] if len(largest) > MAX_NAMED else []
    number = f"{len(costs)} run{'s' * (len(costs) > 1)}"
    by_limit = any(cost.left_sec is None for cost in costs)
    raise ConfigError(
        f"{number} to train need{'s' * (len(costs) == 1)} {needed:,.1f} GPU-hours, more than"
        f" slurm.max_gpu_hours: {most:,.10g} ({file}): {', '.join([*named, *more])}",
        cause="more runs, steps or nodes than the limit allows"
        + "; a run without an estimate counts with the time limit of its job" * by_limit,
        fix="train fewer runs in one command (rows of the sample sheet), fewer steps (train.max_steps)"
        + " or shorter (runtime of train_run)" * by_limit
        + f", or raise slurm.max_gpu_hours in {file}"
        + "; gpu there gives runs of Forge's own trainer an estimate"
        * (by_limit and machine.gpu is None),
    )
