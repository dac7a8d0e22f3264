"""Placement of a run: how many ranks, on which nodes, and the command that launches them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forge.cluster import slurm
from forge.core.config import Config
from forge.core.errors import ConfigError, UnfitError
from forge.core.machine import Machine
from forge.core.process import hostname


@dataclass(frozen=True)
class WorldLayout:
    """How many ranks train. From the profile's resources or the command line."""

    nodes: int = 1
    ranks_per_node: int = 1

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class Placement:
    """Where ranks may run: hosts in rank order, and the Slurm job that has them (None: no Slurm)."""

    hosts: tuple[str, ...]
    job: slurm.Job | None = None

    @classmethod
    def here(cls) -> Placement:
        return cls((hostname(),))

    @property
    def is_here(self) -> bool:
        """Whether it is this host alone, so that nothing needs srun."""
        return self.hosts == (hostname(),)

    def only(self, hosts: Sequence[str]) -> Placement:
        """The same job with these hosts, in the job's order."""
        return Placement(tuple(host for host in self.hosts if host in hosts), self.job)


def check_layout(machine: Machine, layout: WorldLayout, config: Config) -> None:
    """ConfigError where this launcher cannot give these ranks, or they cannot share the batch."""
    if layout.nodes < 1 or layout.ranks_per_node < 1:
        raise ConfigError(
            f"nodes {layout.nodes} and ranks per node {layout.ranks_per_node} must be 1 or more"
        )
    if machine.launcher == "single" and layout.world_size > 1:
        raise ConfigError(
            f"{layout.world_size} ranks with the launcher single, which runs one",
            fix="set `launcher: torchrun` or `launcher: srun` in machine.yaml, or use one rank",
        )
    if config.train.batch_size % layout.world_size:
        fits = [
            n for n in range(1, config.train.batch_size + 1) if config.train.batch_size % n == 0
        ]
        raise ConfigError(
            f"train.batch_size {config.train.batch_size} cannot be shared by a world of"
            f" {layout.world_size} ranks",
            fix=f"use a batch_size that is a multiple of {layout.world_size}, or one of these"
            f" world sizes: {', '.join(map(str, fits))}",
        )


# --- where ---------------------------------------------------------------------------------------


def find_placement(machine: Machine, layout: WorldLayout) -> Placement:
    """The nodes this command may use: those of its Slurm job, or this host where ranks need no srun.

    Raises UnfitError outside of a job where ranks need one, and for a job with too few nodes.
    """
    needs_slurm = machine.launcher == "srun" or layout.nodes > 1
    if not needs_slurm:
        return Placement.here()
    job = slurm.this_job()
    if job is None or not job.nodes:
        raise UnfitError(
            f"launcher {machine.launcher} with {layout.nodes} nodes needs a Slurm job, and this"
            f" shell is in none (SLURM_JOB_ID is {slurm.this_job_id() or 'not set'})",
            cause="the subcommand was called outside of sbatch and salloc",
            fix="use snakemake --profile profiles/slurm-cpu, or start it inside salloc",
        )
    if len(job.nodes) < layout.nodes:
        raise UnfitError(
            f"job {job.id} has {len(job.nodes)} nodes ({', '.join(job.nodes)}), training needs"
            f" {layout.nodes}",
            cause="the allocation and `nodes` of the profile differ",
            fix=f"ask for {layout.nodes} nodes, or give --nodes={len(job.nodes)}",
        )
    _refuse_uneven(job, layout.ranks_per_node)
    return Placement(job.nodes, job)


def _refuse_uneven(job: slurm.Job, ranks_per_node: int) -> None:
    """UnfitError for 3 + 1 tasks where 2 + 2 are needed: a step of these waits for ever."""
    needed = ranks_per_node * job.cpus_per_task
    cores = {count for _, count in job.cpus}
    if len(cores) < 2 or min(cores) >= needed:
        return
    given = ", ".join(
        f"{name} {count} ({count // job.cpus_per_task} tasks)" for name, count in job.cpus
    )
    raise UnfitError(
        f"job {job.id} gives its nodes different numbers of cores: {given}; {ranks_per_node} ranks on"
        f" each need {needed}",
        cause="it was asked for tasks, and not for tasks on each node",
        fix=f"ask for --nodes={len(job.nodes)} --ntasks-per-node={ranks_per_node}"
        f" --cpus-per-task={job.cpus_per_task}",
    )


# --- how: launch lines ---------------------------------------------------------------------------


def launch_line(
    machine: Machine,
    layout: WorldLayout,
    placement: Placement,
    spec: Path,
    *,
    master: tuple[str, int],
    python: str = sys.executable,
) -> list[str]:
    """The command that starts all ranks at this placement, each as `python -m forge.worker SPEC`.

    placement: exactly layout.nodes hosts. master: host and free port, for torchrun's own rendezvous.
    """
    entry = ["-m", "forge.worker", str(spec)]
    job, ranks = placement.job, layout.ranks_per_node
    if machine.launcher == "single":
        return [python, *entry]
    if machine.launcher == "srun":
        assert job
        # exec'd by slurmstepd, no shell between: Slurm signals only the task itself.
        line = slurm.srun(
            job.id,
            placement.hosts,
            tasks_per_node=ranks,
            cpus_per_task=job.cpus_per_task,
            options=_step_options(spec),
        )
        return [*line, python, *entry]
    if layout.nodes == 1 and placement.is_here:
        return [*_torchrun(machine, ranks, python), "--standalone", *entry]
    assert job
    line = slurm.srun(
        job.id,
        placement.hosts,
        cpus_per_task=job.cpus_per_task * ranks,
        options=_step_options(spec),
    )
    meeting = [
        f"--nnodes={layout.nodes}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={master[0]}:{master[1]}",
        f"--rdzv-id={spec.parent.name}",
        f"--rdzv-conf=join_timeout={machine.fabric.timeout_sec:.0f}",
    ]
    return [*line, *_torchrun(machine, ranks, python), *meeting, *entry]


def _step_options(spec: Path) -> tuple[str, ...]:
    # --overlap: a step that was lost with a node holds its cores until Slurm has noticed, and the next
    # one would wait for them.
    return (f"--job-name={spec.parent.name}", "--kill-on-bad-exit=1", "--overlap")


def _torchrun(machine: Machine, ranks: int, python: str) -> list[str]:
    return [
        *(python, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"),
        # Without these SIGUSR1 kills the agent and orphans the ranks.
        "--signals-to-handle=SIGTERM,SIGUSR1,SIGINT",
        f"--shutdown-timeout={max(5, round(machine.stop_grace_sec - 10))}",
    ]
