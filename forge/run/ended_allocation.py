"""Records of an allocation that is over: what `stage` and `preflight` wrote is true of that one alone.

Snakemake removes them when training ends, and leaves them after Ctrl-C, a failed job that nobody
watched, or the target `preflight`. A plan that finds them would train on nodes that nobody staged or
checked, or on none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

from forge.core.config import ResolvedConfig
from forge.core.errors import DataError, UnfitError
from forge.core.files import read_object_or_empty
from forge.core.paths import RunPaths
from forge.hosts.lock import WORKFLOW_LOCK, lock
from forge.slurm import jobs, slurm
from forge.slurm.jobs import QueuedJob


def remove(
    runs: Iterable[ResolvedConfig], say: Callable[[str], None], *, submits: bool, dry: bool
) -> None:
    """Remove the records of allocations that are over, before Snakemake plans. A dry run, which writes
    nothing, says that its plan lacks the rules that make them. submits: whether rules become Slurm
    jobs."""
    for config in runs:
        ended = _of_ended(config, submits, dry)
        if dry and ended:
            say(
                f"without -n also stage_run and preflight_run of {config.run}: {ended[0].parent} is of an"
                " allocation that is over"
            )
        for path in [] if dry else ended:
            path.unlink(missing_ok=True)


def _of_ended(config: ResolvedConfig, submits: bool, dry: bool) -> list[Path]:
    """The records of the run's last allocation; [] where there is none, where a job that may live reads
    them, or where Slurm cannot tell. dry: without taking locks, which are files."""
    paths = RunPaths.of(config)
    found = [path for path in (paths.stage, paths.preflight_pass) if path.is_file()]
    if not found:
        return []
    try:
        with ExitStack() as held:
            if not dry:  # nobody looks after the run, and nobody trains it
                held.enter_context(lock(paths.root, "snakemake", name=WORKFLOW_LOCK))
                held.enter_context(lock(paths.root, "train"))
            ids = set(map(_job_of, found)) - {""}
            if (ids or submits) and _queued(config.run, ids):
                return []
    except (UnfitError, DataError):
        return []
    return found


def _queued(run: str, ids: set[str]) -> QueuedJob | None:
    """The job of the run that runs or waits, another one's allocation by salloc included. Raises
    SlurmSilent."""
    queue = [job for job in jobs.read_queue([os.getuid()]) if job.id != slurm.this_job_id()]
    return jobs.of_run(queue, run, ids, Path.cwd())


def _job_of(record: Path) -> str:
    """The id of the job whose allocation a record is about; "" without one, and where it is cut short."""
    return str(read_object_or_empty(record).get("job") or "")
