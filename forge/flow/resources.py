"""Resources of rules: memory, cost, and whether Slurm could ever start their jobs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from forge.core.config import (
    ResolvedConfig,
)
from forge.hosts.allocation import (
    Allocation,
    plain,
)
from forge.run import cost
from forge.run.programs import program_of
from forge.slurm import submission
from forge.slurm.sbatch import Request, requests_of
from forge.slurm.slurm import refuse_missing

PROGRAM_MB = 8000  # for what another program has trained, whose size is not known


def of_profile(rule: str, settings: Any) -> dict[str, Any]:
    """Resources that the profile gives a rule. settings: Snakemake's ResourceSettings."""
    own = settings.overwrite_resources.get(rule, {})
    return {n: plain(v) for n, v in {**(settings.default_resources or {}), **own}.items()}


def check_cost(runs: dict[str, ResolvedConfig], allocation: Allocation, due: Iterable[Any]) -> str:
    """A line with what the runs that will be trained cost; "" for none. due: jobs that will run. Raises
    ConfigError for more than slurm.max_gpu_hours."""
    costs, machine = cost.costs(runs, allocation, due), allocation.machine
    cost.refuse_more(costs, machine, allocation.of_profile["machine"])
    return cost.summary(costs, machine)


def check_submission(
    dag: Any, due: Iterable[Any], folders: Iterable[str], say: Callable[[str], None]
) -> list[Request]:
    """The requests to Slurm. ConfigError for a job of Snakemake's plan that Slurm could never start,
    UnfitError without Slurm's programs. due: jobs that will run. folders: that nodes must see, beside the
    project's."""
    refuse_missing("sbatch", "squeue", "scontrol")
    submission.check_folders([Path.cwd(), *map(Path, folders)], say)
    jobs_due = {dag.get_job_group(job) or job for job in due}
    requests = requests_of(jobs_due, dag.workflow.executor_settings)
    submission.check(requests, say)
    return requests


def validation_mem_mb(
    config: ResolvedConfig, world_size: int, defaults: Mapping[str, Any] | None
) -> int:
    """Memory of validate_run in MB, by the size of the model; that of default-resources, if it is more.

    world_size: ranks that train the run. defaults: default-resources of the profile, as Snakemake has
    them.
    """
    given = plain((defaults or {}).get("mem_mb"))
    of_profile = given if isinstance(given, int) else 0  # else a formula of Snakemake's own
    needed = program_of(config).validation_bytes(world_size)
    if needed is None:
        return of_profile or PROGRAM_MB
    return max(of_profile, math.ceil(needed / 10**6))
