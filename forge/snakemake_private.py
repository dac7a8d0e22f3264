"""Changes that Forge makes inside of Snakemake (9.27). No other module reaches for what Snakemake does
not document; tests/unit/test_snakemake_private.py fails where a release has it otherwise."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from forge.core.errors import Exit


def refusal(message: str) -> Exception:
    """The error with which Snakemake ends for a user's mistake: the message alone. To a WorkflowError
    from these files Snakemake adds where in them that was raised, as lines of a traceback."""
    from snakemake.exceptions import WorkflowError

    class Refusal(WorkflowError):
        # Some context managers set it.
        __traceback__ = property(lambda _: None, lambda *_: None)

    return Refusal(message)


def end_at_sigterm() -> None:
    """Let SIGTERM end Snakemake whatever its main thread does; before its scheduler is made.

    Its handler takes a lock in the main thread. Where that holds the lock already, as while it chooses
    jobs to start, up to 10 s with the solver of the default scheduler, Snakemake would wait for ever. A
    thread of its own waits until the lock is free.
    """
    from snakemake.scheduling.job_scheduler import JobScheduler

    handler = JobScheduler.exit_gracefully

    def in_a_thread(scheduler: JobScheduler, *_: Any) -> None:
        threading.Thread(target=handler, args=(scheduler,), daemon=True).start()

    JobScheduler.exit_gracefully = in_a_thread


def end_where(is_superseded: Callable[[], bool | None]) -> None:
    """Let the Snakemake in a job end at once where a later start of the job has the run, before it
    touches files: it would remove outputs of a rule before that rule, and after it has failed.

    is_superseded: None where that is not known. Then a rule begins, and after a failure outputs stay:
    those of Forge's rules are complete or absent.
    """
    from snakemake.jobs import Job

    prepare, cleanup = Job.prepare, Job.cleanup

    async def prepare_own(job: Job) -> None:
        if is_superseded():
            os._exit(Exit.UNFIT)
        await prepare(job)

    async def cleanup_own(job: Job, skip_outputs: Any) -> None:
        if is_superseded() is not False:
            os._exit(Exit.UNFIT)
        await cleanup(job, skip_outputs)

    Job.prepare, Job.cleanup = prepare_own, cleanup_own
