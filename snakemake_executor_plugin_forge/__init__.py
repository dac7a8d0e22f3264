"""The executor `forge` of Snakemake: jobs as the plugin `slurm` submits them, watched by Forge.

Snakemake finds an executor by the name of its package, which must be at the top level. What this one does
is in forge/slurm/job_watch.py.
"""

import shlex
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from snakemake_executor_plugin_slurm import Executor as SlurmExecutor
from snakemake_executor_plugin_slurm import ExecutorSettings as SlurmSettings
from snakemake_executor_plugin_slurm import common_settings

__all__ = ["Executor", "ExecutorSettings", "common_settings"]


# Not with annotations as strings: Snakemake takes the types of options from them.
@dataclass
class ExecutorSettings(SlurmSettings):
    """The options of the plugin, as --forge-NAME. Those here as class variables are no options."""

    # sbatch --requeue: Slurm starts a preempted job, or one whose node died, again by itself.
    requeue: ClassVar[Any] = property(lambda settings: not settings.no_requeue)
    # Of the plugin's own status checks, which Forge replaces. Without them the plugin prepares none.
    status_command: ClassVar[None] = None
    status_attempts: ClassVar[None] = None
    init_seconds_before_status_checks: ClassVar[None] = None
    # Nothing removes the log of a job when it succeeds; True would turn off the option below.
    keep_successful_logs: ClassVar[bool] = False
    delete_logfiles_older_than: int = field(
        default=0,
        metadata={"help": "Remove logs of Slurm after so many days; 0 keeps all of them."},
    )


class Executor(SlurmExecutor):
    """Submits jobs to Slurm, retries while Slurm is down, and says why a job waits or has ended.

    Forge is imported here: Snakemake imports this module also where Forge's packages are missing, as in a
    clone without them, and then says what to install.
    """

    run_uuid: str  # in Slurm the name of all jobs of this Snakemake

    def __init__(self, workflow: Any, logger: Any) -> None:
        from forge.slurm.job_watch import JobWatch

        # First: the thread that watches the jobs is started by the base class.
        self._watch = JobWatch(self, super().run_job, super().cancel_jobs)
        self._without_snakemake: set[Any] = set()  # ids of jobs; also of those that were taken back
        self._submitted: set[str] = set()  # ids in Slurm of the jobs of this command
        super().__init__(workflow, logger)

    def __post_init__(self, test_mode: bool = False) -> None:
        from forge.slurm.adopt import controlled_name
        from forge.slurm.job_watch import called_after_runs
        from forge.slurm.slurm import settle_environment

        settle_environment()  # a job that the plugin's squeue does not see would count as ended
        super().__post_init__(test_mode)
        due = self.workflow.dag.needrun_jobs()
        self.run_uuid = controlled_name() or called_after_runs(self.run_uuid, due)

    def run_job(self, job: Any) -> None:
        self._watch.submit(job)

    def get_job_exec_prefix(self, job: Any) -> str:
        from forge.slurm.jobs import runs_in_batch_step
        from forge.slurm.slurm import RULES_IN_BATCH_STEP

        once = runs_in_batch_step(job.rules, self.array_jobs)
        return f"export {RULES_IN_BATCH_STEP}=1" if once else ""

    def format_job_exec(self, job: Any) -> str:
        """The command of a job: without `slurm-jobstep`, which would start a second Snakemake in it; for
        a whole allocation without any Snakemake."""
        from forge.slurm.jobs import runs_in_batch_step, write_steps

        line: str = super().format_job_exec(job)
        if not runs_in_batch_step(job.rules, self.array_jobs):
            return line
        before, snakemake, _ = line.partition(" -m snakemake ")
        if snakemake and (path := write_steps(job)):
            self._without_snakemake.add(job.jobid)
            return f"{before} -P -m forge.batch_step {shlex.quote(str(path))}"
        return line.replace(f" {self.additional_general_args()} ", " ")

    def report_job_submission(self, job_info: Any, register_job: bool = True) -> None:
        """Does not mark outputs as incomplete where no Snakemake in the job takes the mark away: should
        this one be killed, the next would run the whole job again. They are complete or absent."""
        own = job_info.job.jobid in self._without_snakemake
        super().report_job_submission(job_info, register_job=register_job and not own)

    def _report_job_submission_threadsafe(self, job_info: Any) -> None:
        self._submitted.add(str(job_info.external_jobid))
        super()._report_job_submission_threadsafe(job_info)

    def _report_job_error_threadsafe(self, job_info: Any, msg: str) -> None:
        self._watch.note_refusal(job_info, msg)

    async def check_active_jobs(self, active_jobs: Sequence[Any]) -> AsyncIterator[Any]:
        async for job_info in self._watch.check(active_jobs):
            yield job_info

    async def sleep(self) -> None:
        await self._watch.sleep()

    def cancel_jobs(self, active_jobs: Sequence[Any]) -> None:
        self._watch.cancel(active_jobs)
