"""What to do when training stops or a node is lost: requeue, restart or end, by the recorded cause."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from forge.cluster import slurm
from forge.cluster.placement import Place
from forge.core import events
from forge.core.errors import ForgeError
from forge.core.machine import Machine
from forge.core.paths import RunPaths
from forge.core.terminal import say
from forge.launch.rank_records import RankRecord

# Stops after which a Slurm job goes back to the queue. Ctrl-C and a STOP file are a person's wish.
REQUEUED_CAUSES = ("deadline", "SIGUSR1", "SIGTERM", "peer lost")

# Slurm ends a requeued job within its KillWait (30 s by default) plus a scheduling round.
REQUEUE_WAIT_SEC = 180.0


@contextmanager
def back_to_the_queue_if_preempted(machine: Machine) -> Iterator[None]:
    """For what comes before training: an error while the job is preempted is the preemption's.

    Slurm requeues a preempted job only while its batch script runs or has ended well: a rule that
    fails because its steps were signalled would end the job for good.
    """
    try:
        yield
    except ForgeError:
        job = slurm.this_job()
        may = job and job.is_preempted and job.batch and job.restarts < machine.slurm.max_restarts
        if job and may and not slurm.requeue(job.id):
            say(f"job {job.id} is preempted: it goes back to the queue and begins again")
            _wait_for_the_end()
        raise


def was_cancelled(place: Place) -> bool:
    """Whether Slurm is ending the job: what is lost then was taken, and needs no other start."""
    if place.job is None:
        return False
    try:
        now = slurm.show_job(place.job.id)
    except slurm.SlurmSilent:
        return False  # a controller that is away cancels nothing
    return now is None or now.state != "RUNNING"


def requeue(
    record: RankRecord, paths: RunPaths, job: slurm.Job, machine: Machine, *, step: int
) -> tuple[bool, str]:
    """Send the job back to the queue where its end asks for it: whether it will be back, and why this
    has not sent it.

    The job is asked for just before the call: it may have been cancelled meanwhile. step: of the last
    checkpoint. Returns when Slurm has told this process to end. Whether the run gets anywhere is the
    progress gate's question, at the next start.
    """
    if record.cause not in REQUEUED_CAUSES:
        return False, f"{record.cause} ends it"
    try:
        now = slurm.show_job(job.id)
    except slurm.SlurmSilent as err:
        return False, err.what
    if now is None:
        return False, f"job {job.id} is gone: it was cancelled"
    sent_back = now.is_waiting or now.restarts > job.restarts
    if sent_back or now.is_preempted:
        events.record(paths.events, events.Preempted(job=job.id, step=step))
    if reason := _guard(paths, now, machine, sent_back=sent_back):
        return sent_back, reason
    events.record(paths.events, events.Requeue(job=job.id, cause=record.cause, step=step))
    if refusal := slurm.requeue(job.id):
        return False, f"Slurm refused to requeue it: {refusal}"
    say(f"job {job.id} goes back to the queue and will resume from step {step}")
    _wait_for_the_end()
    return True, ""


def _guard(paths: RunPaths, now: slurm.Job, machine: Machine, *, sent_back: bool) -> str:
    """Why the job, as it is now, must not go back to the queue; "" if it may."""
    reasons = {
        f"Slurm has sent job {now.id} back itself": sent_back,
        # scancel makes it COMPLETING: requeuing would bring a cancelled job back.
        f"job {now.id} is {now.state}: it was cancelled": now.state != "RUNNING",
        f"job {now.id} is an interactive allocation": not now.batch,
        f"{paths.stop} asks it to stop": paths.stop.exists(),
        f"it was restarted {now.restarts} times (slurm.max_restarts)": (
            now.restarts >= machine.slurm.max_restarts
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _wait_for_the_end() -> None:
    """Be there until Slurm ends us: leaving earlier would end the rule as failed."""
    ended: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda n, _: ended.append(n))
    parent, end = os.getppid(), time.monotonic() + REQUEUE_WAIT_SEC
    while not ended and os.getppid() == parent and time.monotonic() < end:
        time.sleep(0.1)


def pick_hosts(place: Place, nodes: int) -> Place | None:
    """The first `nodes` hosts of the place; None if there are too few."""
    return place.only(place.hosts[:nodes]) if len(place.hosts) >= nodes else None
