"""Jobs that an earlier Snakemake has submitted, taken back by the one that runs now.

A Snakemake that was killed leaves its jobs in Slurm's queue. The next one would submit each of them once
more, into the same directory. Where a program starts one Snakemake after the other (FORGE_CONTROLLED),
jobs have a name that depends only on the project and on the runs as they were submitted, so that the next
one finds those that do what it is about to submit.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from forge.core.files import read_json, short_id
from forge.slurm import jobs, slurm
from forge.slurm.jobs import QueuedJob

# Set by that program: the name of the file with the runs as they were submitted
# (`workflow_command.keep_for_jobs`). Jobs inherit it, and do not submit.
CONTROLLED = "FORGE_CONTROLLED"
MAX_NAME = 40  # characters of the runs' names in the name of a job
ASK_SEC = 10.0


def job_name(runs: Iterable[str], submitted: str) -> str:
    """The name in Slurm of all jobs that are submitted in this project for these runs, to be taken back.
    submitted: the file with the runs as they were submitted."""
    project = [os.path.realpath(Path.cwd()), Path(submitted).name]
    return f"{'-'.join(sorted(runs))[:MAX_NAME]}_{short_id(project)}"


def controlled_name() -> str:
    """The name of the jobs of this Snakemake; "" where it is to take none back. Raises DataError where
    the file with the runs is gone."""
    submitted = os.environ.get(CONTROLLED, "")
    return job_name(read_json(Path(submitted))["submitted"], submitted) if submitted else ""


def adoptable(name: str, *, patience_sec: float | None = None) -> list[QueuedJob]:
    """The jobs of this name and folder that wait or run. Raises SlurmSilent."""
    listed = jobs.read_queue(
        [os.getuid()], name=name, patience_sec=patience_sec, timeout_sec=ASK_SEC
    )
    home = os.path.realpath(Path.cwd())
    return [
        job
        for job in listed
        if (job.is_living or job.is_waiting) and os.path.realpath(job.folder) == home
    ]


def _same(listed: Iterable[QueuedJob], comment: str) -> QueuedJob | None:
    """The job that does what one with this comment would do, a running one rather than a waiting one. An
    allocation that has staged and tested its nodes has more rules than what is left of them to do."""
    run = jobs.run_of(comment)
    same = [job for job in listed if job.comment == comment or (run and job.run == run)]
    return max(same, key=lambda job: job.is_living, default=None)


def take_back(executor: Any, job: Any, *, look: bool = False) -> str:
    """Report the job in Slurm's queue that does what this job of Snakemake would do as submitted by this
    executor, in place of sbatch; its state, "" without one. look: also where no earlier Snakemake has
    left any, since this one may have submitted it.

    Raises ConnectionError while Slurm does not answer: nothing must be submitted then.
    """
    if not (look or os.environ.get(CONTROLLED)):
        return ""
    from snakemake_executor_plugin_slurm import SubmittedJobInfo
    from snakemake_executor_plugin_slurm.utils import get_job_wildcards

    # As run_job of the plugin (2.8.0) writes comment and log.
    wildcards = get_job_wildcards(job)
    comment = f"rule_{job.name}" + (f"_wildcards_{wildcards}" if wildcards else "")
    trouble = ""
    try:
        listed = adoptable(executor.run_uuid, patience_sec=0)
        found = _same((one for one in listed if one.id not in executor._submitted), comment)
        if found and not jobs.rules_of(comment) <= jobs.rules_of(found.comment):
            trouble = f"job {found.id} of the same run, which does less, has not ended"
    except slurm.SlurmSilent as err:
        trouble = err.what
    if trouble:  # outside of `except`: the context of an error is what its reader shows
        raise ConnectionError(f"{slurm.CONTROLLER_AWAY} slurm controller, or not yet: {trouble}")
    if not found:
        return ""
    rules = found.comment.removeprefix("rule_")  # of the job that was submitted
    kind = f"group_{rules}" if job.is_group() else f"rule_{job.name}"
    log = executor.slurm_logdir / kind / wildcards / f"{found.id}.log"
    executor.logger.info(
        f"Job {job.jobid} has been submitted with SLURM jobid {found.id} (log: {log}) before: it is"
        f" {found.state}, and is watched again."
    )
    # The Snakemake that submitted it has marked its outputs as incomplete, where one in the job takes the
    # mark away.
    executor._without_snakemake.add(job.jobid)
    executor._report_job_submission_threadsafe(
        SubmittedJobInfo(job, external_jobid=found.id, aux={"slurm_logfile": log})
    )
    return found.state
