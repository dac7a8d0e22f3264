"""What Forge changes inside of Snakemake (9.27). No other module reaches for what Snakemake does not
document; tests/unit/test_snakemake_private.py fails where a release has it otherwise."""

from __future__ import annotations

import threading
from typing import Any


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
