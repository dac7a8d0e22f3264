"""Placement of a run: the resources to request, the nodes to use, the command that launches ranks."""

from __future__ import annotations

import difflib
import re
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


# --- how: what Slurm is asked for ----------------------------------------------------------------


def allocation_resources(given: Mapping[str, Any], machine: Machine) -> dict[str, Any]:
    """Resources of an allocation's rules, from what the profile sets for `train_run`.

    `mpi=""` keeps the executor from wrapping rules in an srun of its own: a second one inside would
    wait for ever or run one rank. Raises ConfigError for what could not work.
    """
    _refuse_own(given)
    ranks, nodes = _number(given, "tasks_per_node"), _number(given, "nodes")
    gpus = gpus_per_node(given)
    if gpus is not None and gpus != ranks:
        raise ConfigError(
            f"profile: train_run asks for {gpus} GPUs a node and {ranks} ranks a node (tasks_per_node)",
            cause="each rank drives one GPU",
            fix=f'set tasks_per_node: {gpus}, or gres: "gpu:{ranks}"',
        )
    if machine.launcher == "single" and nodes * ranks > 1:
        raise ConfigError(
            f"profile: {nodes} nodes with {ranks} ranks each, and launcher single, which runs one",
            fix="set `launcher: srun` or `launcher: torchrun` in machine.yaml",
        )
    asked = nodes + machine.preflight.spare_nodes
    resources = {**given, "mpi": "", "nodes": asked, "tasks_per_node": ranks}
    if gpus is None:
        resources["tasks"] = asked * ranks  # with GPUs it would become --ntasks-per-gpu
    return resources


def _refuse_own(given: Mapping[str, Any]) -> None:
    """What a profile must not set for `train_run`, because it is made from nodes and tasks_per_node."""
    fixes = {
        "tasks": "give nodes and tasks_per_node; Forge makes the number of tasks from them",
        "mpi": "leave it out; `launcher` in machine.yaml says how ranks start",
        "slurm_extra": "write these options as slurm.options in machine.yaml, where Forge adds its own",
        "gpu": 'give GPUs per node, as gres: "gpu:4"',
    }
    for key, fix in fixes.items():
        if key in given:
            raise ConfigError(
                f"profile: set-resources of train_run has {key}={given[key]!r}", fix=fix
            )


# Resources that Snakemake or its Slurm executor reads (submit_string.py and __init__.py of 2.8.0), and
# our own `machine`.
_KNOWN_RESOURCES = (
    *("machine", "nodes", "tasks_per_node", "tasks_per_gpu", "gres", "gpu_model"),
    *("cpus_per_task", "cpus_per_gpu", "mem", "mem_mb", "mem_mib", "mem_mb_per_cpu"),
    *("disk", "disk_mb", "disk_mib", "runtime", "tmpdir", "constraint", "qos"),
    *("slurm_account", "slurm_partition", "slurm_cluster", "cluster", "clusters"),
)


def refuse_unknown(given: Mapping[str, Any], custom: Collection[str]) -> None:
    """ConfigError for a name that nobody reads: Snakemake would take it without a word.

    custom: names that the user gave a limit for with --resources.
    """
    for name, value in given.items():
        if name in _KNOWN_RESOURCES or name in custom:
            continue
        close = difflib.get_close_matches(name, _KNOWN_RESOURCES, n=1)
        raise ConfigError(
            f"profile: set-resources of train_run has {name}={value!r}, and no such resource is known"
            f"{f' (did you mean {close[0]}?)' if close else ''}",
            fix="correct the name, or give the resource a limit of your own with `resources` in"
            " config.yaml of the profile",
        )


def _number(given: Mapping[str, Any], key: str) -> int:
    value = given.get(key, 1)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"profile: train_run has {key}={value!r}", fix="give a whole number from 1"
        )
    return value


def gpus_per_node(given: Mapping[str, Any]) -> int | None:
    """GPUs a node in `gres` (`gpu:4`, `gpu:h100:4`); None without GPUs. Raises ConfigError."""
    gres = str(given.get("gres", ""))
    if not gres:
        return None
    found = re.fullmatch(r"gpu(?::[A-Za-z][\w.]*)?(?::(\d+))?", gres)
    if not found:
        raise ConfigError(
            f"profile: train_run has gres {gres!r}", fix='write it as "gpu:4" or "gpu:h100:4"'
        )
    return int(found.group(1) or 1)


def sbatch_options(machine: Machine, ranks_per_node: int, bad_nodes: Sequence[str]) -> str:
    """What the executor's own options do not cover, as slurm_extra.

    `--signal` without `B:` reaches the ranks; with it, it would end the batch shell's Snakemake.
    """
    options = [f"--ntasks-per-node={ranks_per_node}", "--open-mode=append"]
    if machine.slurm.warn_sec:
        options.append(f"--signal=SIGUSR1@{machine.slurm.warn_sec}")
    if machine.preflight.spare_nodes:
        options.append("--no-kill")  # a spare takes over for a node that dies
    given = shlex.split(machine.slurm.options)
    own = [o.partition("=")[2] for o in given if o.startswith("--exclude=")]
    given = [o for o in given if not o.startswith("--exclude=")]
    excluded = [n for o in own for n in slurm.expand(o)] + machine.slurm.exclude + list(bad_nodes)
    if excluded:
        options.append(f"--exclude={','.join(dict.fromkeys(excluded))}")
    return shlex.join(options + given)
