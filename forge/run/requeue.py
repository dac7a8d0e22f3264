"""Requeue of the Slurm job after a stop, and the nodes for a restart after the loss of one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence, Set

from forge.core import events
from forge.core.errors import ForgeError
from forge.core.events import PERSONS_CAUSES, STOP_CAUSES
from forge.core.machine import Machine
from forge.core.paths import RunPaths
from forge.core.terminal import say
from forge.hosts.placement import Placement
from forge.launch.lost_ranks import RESTARTED_CAUSES
from forge.launch.rank_records import RankRecord
from forge.slurm import exclude, slurm

# Causes after which the job is requeued; a stop by a person is that person's decision.
REQUEUED_CAUSES = {*STOP_CAUSES, *RESTARTED_CAUSES} - {"", *PERSONS_CAUSES}

# Slurm ends a requeued job within its KillWait (30 s by default) plus a scheduling round.
REQUEUE_WAIT_SEC = 180.0


# A site that suspends a job for others (gang scheduling) may do so many times.
MAX_SUSPENSIONS = 10


def before_training(machine: Machine, step: Callable[[], None]) -> None:
    """Run a step before training, `stage` or `preflight`, to its end.

    An error while the job was suspended says nothing: waits for nodes went on without them. The step is
    run again. After an error while the job is being preempted, the job is requeued: Slurm itself does
    that only while its batch script runs or after it succeeded; a rule that fails because its steps were
    signaled would end the job for good.
    """
    job = _this_job()
    for _ in range(MAX_SUSPENSIONS):
        try:
            return step()
        except ForgeError as err:
            before, job = job, _this_job()
            if before and job and job.suspended != before.suspended:
                say(f"job {job.id} was suspended meanwhile, so that this says nothing: {err.what}")
                continue
            if job:
                _requeue_if_preempted(job, machine)
            raise
    return step()


def _this_job() -> slurm.Job | None:
    """The job of this process; None outside of Slurm, and while Slurm does not answer."""
    try:
        return slurm.this_job()
    except slurm.SlurmSilent:
        return None


def _requeue_if_preempted(job: slurm.Job, machine: Machine) -> None:
    if not (job.is_preempted and job.batch and job.restarts < machine.slurm.max_restarts):
        return
    ended = _catch_signals()
    if not slurm.requeue(job.id, job.restarts):
        say(f"job {job.id} is preempted: it is requeued and will start again")
        _wait_for_the_end(ended)


def was_cancelled(placement: Placement) -> bool:
    """Return whether Slurm is ending the job: lost ranks were then killed by Slurm, and are not
    restarted."""
    if placement.job is None:
        return False
    try:
        now = slurm.show_job(placement.job.id)
    except slurm.SlurmSilent:
        return False  # a controller that does not respond has not cancelled the job
    return now is None or not now.is_running


def requeue(
    record: RankRecord, paths: RunPaths, job: slurm.Job, machine: Machine, *, step: int
) -> tuple[bool, str]:
    """Requeue the job, if the cause of its stop allows that. Returns whether the job will start again,
    and why this call has not requeued it ("" if it has).

    The state of the job is read just before, since it may have been cancelled. step: of the last
    checkpoint. Returns after Slurm has signaled this process to end. Crash-loop detection is left to
    the next start.
    """
    if record.cause not in REQUEUED_CAUSES:
        return False, f"{record.cause} ends the run"
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
    ended = _catch_signals()
    if refusal := slurm.requeue(job.id, now.restarts):
        return False, f"job {job.id} was not requeued: {refusal}"
    of_user = {name for names in machine.slurm.exclude for name in slurm.expand(names)}
    again = exclude.tried_again(paths.bad_nodes) - of_user
    _keep_off(exclude.read(paths.bad_nodes), again, now)
    say(f"job {job.id} is requeued and will resume from step {step}")
    _wait_for_the_end(ended)
    return True, ""


def _keep_off(unhealthy: Sequence[str], again: Set[str], job: slurm.Job) -> None:
    """Let the requeued job start on other nodes: Slurm takes a node with a broken GPU for healthy, and
    changes the nodes of a job only while it is pending. again: nodes that it no longer excludes; with all
    that it ever did, too few might be left."""
    names = sorted({*job.excluded} - again | {*unhealthy})
    if names == sorted(job.excluded):
        return
    # Slurm is ending the job, and may end the first command with it.
    if slurm.exclude(job.id, names) and (refusal := slurm.exclude(job.id, names)):
        may = f"may get {', '.join(unhealthy)} again" if unhealthy else "excludes the same nodes"
        say(f"warning: job {job.id} {may}: {refusal}")


def _guard(paths: RunPaths, now: slurm.Job, machine: Machine, *, sent_back: bool) -> str:
    """Why the job in this state must not be requeued; "" if it may."""
    reasons = {
        f"Slurm has already requeued job {now.id}": sent_back,
        # A cancelled job is COMPLETING, and a requeue would start it again. So is one whose batch step
        # was killed, by the kernel for its memory or by hand, while Slurm ends its other steps.
        f"job {now.id} is {now.state}: it was cancelled, or its batch step was killed": (
            not now.is_running
        ),
        f"job {now.id} is an interactive allocation": not now.batch,
        f"{paths.stop} asks it to stop": paths.stop.exists(),
        f"job {now.id} was restarted {now.restarts} times (slurm.max_restarts)": (
            now.restarts >= machine.slurm.max_restarts
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _catch_signals() -> list[int]:
    """The signals that will have come, for `_wait_for_the_end`. Slurm sends SIGTERM within milliseconds
    of a requeue."""
    ended: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda n, _: ended.append(n))
    return ended


def _wait_for_the_end(ended: list[int]) -> None:
    """Wait until Slurm ends this process: if it exited earlier, the rule would fail."""
    parent, end = os.getppid(), time.monotonic() + REQUEUE_WAIT_SEC
    while not ended and os.getppid() == parent and time.monotonic() < end:
        time.sleep(0.1)


def pick_hosts(placement: Placement, nodes: int, avoid: Sequence[str] = ()) -> Placement:
    """The first `nodes` hosts of the placement, which has so many; those to avoid only where others are
    too few."""
    assert len(placement.hosts) >= nodes
    return placement.only(sorted(placement.hosts, key=lambda host: host in avoid)[:nodes])
