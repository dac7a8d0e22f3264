"""Detects that a Slurm job of the workflow has ended, and says why: what Forge's executor adds.

The executor plugin `slurm` (2.8.0) loses jobs when neither squeue nor sacct responds
(docs/measured/upstream.md), waits forever for a job that Slurm has forgotten, polls at intervals that
grow to 180 s (also before the command ends), and never says why a job is pending or who cancelled it.
Forge replaces its status checks by one squeue for all jobs, every few seconds. Submission and
everything else is left to the plugin.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from forge.core.paths import RunPaths
from forge.core.process import user_name
from forge.slurm import adopt, jobs, sbatch, slurm
from forge.slurm.jobs import (
    QueuedJob,
    advice_on_excluded,
    excluded_nodes,
    lasting_advice,
    slow_advice,
)

PLUGIN_VERSION = "2.8.0"  # the tested version of the executor plugin
POLL_SEC = 5.0  # the end of a job is reported within 10 s: this pause, squeue, and sacct
# A job that has written its outputs ends soon: Slurm is asked after a second then, so often at most.
QUICK_CHECKS = 3
TELL_AGAIN_SEC = 600.0
# Longer than a night or a day of maintenance, but finite.
SILENCE_SEC = 48 * 3600.0
SQUEUE_SEC = 10.0
SACCT_SEC = 5.0
# A cancellation reaches accounting a moment after squeue.
WHO_SEC = 3.0

RERUN = "Rerun the same command to submit it again; training resumes from its last checkpoint."
# Meaning of Slurm's job states after which the job itself could write no error, and what to do.
ENDS = {
    "BOOT_FAIL": f"ended because a node did not boot. {RERUN}",
    "CANCELLED": "was cancelled by {who}. " + RERUN,
    "DEADLINE": f"ended at its deadline. {RERUN}",
    "NODE_FAIL": "ended because a node failed ({nodes}). " + RERUN,
    "OUT_OF_MEMORY": f"ended because it used more memory than it has: raise mem_mb. {RERUN}",
    "PREEMPTED": "was preempted, and its partition cancels preempted jobs: rerun the same command,"
    " or set another slurm_partition in the profile.",
    "TIMEOUT": f"ended at its time limit: raise runtime in the profile. {RERUN}",
}
# In an error of sbatch after which the job may be in the queue.
TIMED_OUT = "submission failed: Socket timed out"
# In errors of sbatch and sacctmgr while a daemon is down or busy.
AWAY = (slurm.CONTROLLER_AWAY, "Connection refused", TIMED_OUT)
# For a request of an sbatch that was killed to reach the controller.
ON_ITS_WAY_SEC = 2.0
MANY = (
    "after another job of yours has ended: Slurm allows no more in the queue ({limit}). `jobs: NUMBER` in"
    " config.yaml of the profile sets how many this command has there at a time"
)
# Slurm may requeue jobs in these states, so that they count as ended when seen twice.
PASSING = ("NODE_FAIL", "PREEMPTED")


def called_after_runs(name: str, due: Iterable[Any]) -> str:
    """The name of a command's Slurm jobs, which shows its runs in squeue. name: a unique one. due: jobs
    of Snakemake that will run."""
    runs = sorted({run for job in due if (run := job.wildcards_dict.get("run"))})
    return f"{'-'.join(runs)[: adopt.MAX_NAME]}_{name}" if runs else name


class JobWatch:
    """Watches the jobs of one executor. submit() runs in threads of the plugin, check() and sleep() in
    its waiting thread, cancel() in the main thread."""

    def __init__(
        self,
        executor: Any,
        submit: Callable[[Any], None],
        cancel: Callable[[Sequence[Any]], None],
    ) -> None:
        """submit, cancel: the plugin's own."""
        self._executor, self._submit, self._cancel = executor, submit, cancel
        self._cancelled = False
        self._refusals: dict[int, str] = {}  # id() of a job in submission -> error
        self._before: dict[int, list[object]] = {}  # id() of a job -> state of its outputs before
        self._asked: list[Any] = []  # jobs of the current check that have not ended
        self._messages: dict[str, tuple[str, float]] = {}  # subject of a message -> its state, time
        self._unlisted: dict[str, float] = {}  # job id -> time since which it is not listed
        self._quick: dict[str, int] = {}  # job id -> quick checks since its outputs are there
        self._passing: set[str] = set()
        # id() of jobs that have run, or may have: Slurm then changes their request.
        self._started: set[int] = set()
        self._silent_since: float | None = None  # on the monotonic clock

    def submit(self, job: Any) -> None:
        """Submit a job; retry while Slurm is down, for SILENCE_SEC at most, and while other jobs of this
        command take up the number of jobs that Slurm allows. Where the answer to sbatch was lost, the job
        is looked for in the queue first. Nothing after `cancel`; a job that sbatch was submitting then is
        cancelled."""
        if self._cancelled:
            return
        # Outputs of an earlier job must not count as success of this job.
        self._before[id(job)] = _stamps(job)
        end, alone, look = time.monotonic() + SILENCE_SEC, 0, False
        while trouble := self._try_to_submit(job, look=look):
            look = look or TIMED_OUT in trouble
            limit = slurm.submit_limit(trouble)
            # Twice: the last other job may have ended since sbatch refused this job.
            alone = 0 if not limit or self._has_jobs() else alone + 1
            is_away = any(sign in trouble for sign in AWAY) and time.monotonic() < end
            if self._cancelled or alone > 1 or not (limit or is_away):
                when = f"\nIt can be submitted {MANY.format(limit=limit)}" if limit else ""
                self._refuse(job, trouble + when)
                break
            words = MANY.format(limit=limit) if limit else "when Slurm takes new jobs"
            self._tell("sbatch", limit or "away", f"{_name(job)} is submitted {words}")
            time.sleep(POLL_SEC)
        else:
            self._messages.pop("sbatch", None)
        if self._cancelled:
            self._cancel_by_name(again=bool(trouble))

    def _has_jobs(self) -> bool:
        """Return whether jobs of this command are in the queue; also true when Slurm does not respond."""
        try:
            listed = jobs.read_queue(
                [os.getuid()], name=self._executor.run_uuid, patience_sec=0, timeout_sec=SQUEUE_SEC
            )
        except slurm.SlurmSilent:
            return True
        return any(job.is_living or job.is_waiting for job in listed)

    def _try_to_submit(self, job: Any, *, look: bool) -> str:
        """Submit the job. Returns the error, or "". look: an earlier try may have submitted it."""
        self._refusals[id(job)] = ""
        try:
            if state := adopt.take_back(self._executor, job, look=look):
                if not look:  # a job of an earlier Snakemake
                    waits = state in slurm.WAITING
                    # One that runs may have written its outputs already.
                    self._before[id(job)] = _stamps(job) if waits else _absent(job)
                    self._started.add(id(job))  # one that waits may have been requeued
            else:
                self._submit(job)
        except Exception as err:  # in a thread, it would be lost, and Snakemake would wait forever
            return str(err.__context__ or err)
        return self._refusals.pop(id(job))

    def note_refusal(self, info: Any, msg: str) -> None:
        """Replaces the plugin's report, which for a group lacks the error of sbatch."""
        if id(info.job) in self._refusals:
            self._refusals[id(info.job)] = msg
        else:  # of a job array
            self._refuse(info.job, msg)

    def _refuse(self, job: Any, why: str) -> None:
        self._fail(job, f"{_name(job)} could not be submitted: {why}")

    def cancel(self, active: Sequence[Any]) -> None:
        """Cancel these jobs, those that Snakemake has in no list during a check, and those that sbatch
        has not reported yet. What it submits after this is cancelled by `submit`."""
        self._cancelled = True
        try:
            self._cancel([*active, *self._asked_without(active)])
        finally:
            self._cancel_by_name()

    def _cancel_by_name(self, *, again: bool = False) -> None:
        """Cancel all jobs of this command. again: once more after a moment, since Ctrl-C in a terminal
        also ends sbatch, whose request may still be on its way."""
        name = self._executor.run_uuid
        try:
            slurm.cancel_named(name)
            if again:
                time.sleep(ON_ITS_WAY_SEC)
                slurm.cancel_named(name)
        except (slurm.SlurmSilent, slurm.Refused) as err:
            self._executor.logger.error(
                f"a job of this command may have stayed in Slurm's queue ({err}): when Slurm answers,"
                f" scancel --name={name}"
            )

    async def sleep(self) -> None:
        """Pause between two checks, shorter where a job has written its outputs; ends at once when the
        executor shuts down."""
        begun = looked = time.monotonic()
        while self._executor.wait and (now := time.monotonic()) < begun + POLL_SEC:
            if now >= looked + 1:
                looked = now
                if any(self._is_about_to_end(info) for info in self._asked):
                    return
            await asyncio.sleep(0.1)

    def _is_about_to_end(self, info: Any) -> bool:
        """Return whether the outputs of the job are there. A rule of a user may have written them long
        before its end: true for QUICK_CHECKS times."""
        quick = self._quick.get(info.external_jobid, 0)
        if quick == QUICK_CHECKS or not self._left_outputs(info.job):
            return False
        self._quick[info.external_jobid] = quick + 1
        return True

    async def check(self, active: Sequence[Any]) -> AsyncIterator[Any]:
        """Report the jobs that have ended, and yield the others. While Slurm does not respond, all jobs
        count as running, for SILENCE_SEC at most."""
        self._asked = list(active)
        queue = self._queue() if active else {}
        for info in active:
            if queue is None:
                lives = self._while_slurm_is_silent(info)
            else:
                lives = self._lives(info, queue.get(str(info.external_jobid)))
            if lives:
                yield info
            else:
                self._asked = self._asked_without([info])

    def _asked_without(self, others: Sequence[Any]) -> list[Any]:
        """The jobs of the current check that have not ended, without `others`."""
        return [info for info in self._asked if not any(info is other for other in others)]

    def _queue(self) -> dict[str, QueuedJob] | None:
        """The jobs of this command that Slurm lists, by id; None while it does not respond."""
        try:
            listed = jobs.read_queue(
                [os.getuid()],
                name=self._executor.run_uuid,
                patience_sec=0,
                timeout_sec=SQUEUE_SEC,
            )
        except slurm.SlurmSilent as err:
            first = err.what.splitlines()[0]
            words = f"{first}. Jobs continue; this command tries again every {POLL_SEC:g} s."
            self._tell("slurm", "silent", words)
            self._silent_since = self._silent_since or time.monotonic()
            return None
        self._silent_since = None
        if self._messages.pop("slurm", None):
            self._executor.logger.info("Slurm answers again")
        return {job.id: job for job in listed}

    def _while_slurm_is_silent(self, info: Any) -> bool:
        """Return whether to keep waiting for this job while Slurm does not respond; else report it as
        failed."""
        if time.monotonic() - (self._silent_since or time.monotonic()) < SILENCE_SEC:
            return True
        self._fail(
            info.job,
            f"{_name(info.job, info.external_jobid)}: Slurm has not answered for"
            f" {SILENCE_SEC / 3600:g} hours. The job may still run. Rerun the same command when"
            " `squeue` answers: it finds the job, or what the job left.",
        )
        return False

    def _lives(self, info: Any, job: QueuedJob | None) -> bool:
        """Return whether the job has not ended; if it has, report it. job: None where squeue lists
        none."""
        if job is None:
            return self._not_in_queue(info)
        self._unlisted.pop(job.id, None)
        self._restore_request(info.job, job)
        if job.lacks_its_script and sbatch.NO_KILL in str(info.job.resources.get("slurm_extra")):
            self._requeue(info.job, job)
        if job.is_waiting and (words := _why_it_waits(info.job, job)):
            self._tell(job.id, job.reason, f"{_name(info.job, job.id)} {words}")
        else:
            self._messages.pop(job.id, None)
        if job.state in PASSING and job.id not in self._passing:
            self._passing.add(job.id)
            return True
        self._passing.discard(job.id)
        return not self._has_ended(info, job.state, job.nodes)

    def _restore_request(self, job: Any, queued: QueuedJob) -> None:
        """Let a requeued job ask again for what it was submitted with: Slurm leaves it the numbers of
        nodes and tasks of its last start (22.05)."""
        asked = sbatch.flexible_request(job.resources)
        if asked and not queued.is_waiting:
            self._started.add(id(job))
        elif asked and id(job) in self._started:
            if refusal := slurm.update(queued.id, asked):
                words = f"asks for what it had last ({refusal}); this command tries again"
                self._tell(f"request of {queued.id}", "refused", f"{_name(job, queued.id)} {words}")
            else:
                self._started.discard(id(job))

    def _requeue(self, job: Any, queued: QueuedJob) -> None:
        """Requeue a job that has lost its first node: with --no-kill, Slurm (22.05) neither ends it nor
        starts it again, and it would hold its other nodes up to its time limit."""
        now = None
        with contextlib.suppress(slurm.SlurmSilent):
            now = slurm.show_job(queued.id)
        if now and now.is_running:
            refusal = slurm.requeue(queued.id, now.restarts)
            words = (
                f"could not be requeued ({refusal}): scancel {queued.id}"
                if refusal
                else "is requeued"
            )
            what = (
                f"{_name(job, queued.id)} has lost its first node, {queued.batch_host}, and {words}"
            )
            self._tell(queued.id, "first node lost", what)

    def _not_in_queue(self, info: Any) -> bool:
        """Do what `_lives` does for a job that Slurm has forgotten (MinJobAge after its end): judged by
        its outputs, which Forge's rules write last, then by accounting; without either it failed. Outputs
        of a rule of the user may be half written: accounting comes first."""
        since = self._unlisted.setdefault(info.external_jobid, time.monotonic())
        is_written = self._left_outputs(info.job)
        if is_written and self._is_of_forge(info):
            self._executor.report_job_success(info)
            return False
        state = self._accounted(info.external_jobid).partition(" ")[0]
        if self._has_ended(info, state, ""):
            return False
        if is_written and not state:  # nothing else tells of a rule of the user
            self._executor.report_job_success(info)
            return False
        if state and state not in slurm.ENDED and time.monotonic() - since < SILENCE_SEC:
            words = f"is {state} in Slurm's accounting, but squeue does not list it; waiting for its end"
            self._tell(
                info.external_jobid, state, f"{_name(info.job, info.external_jobid)} {words}"
            )
            return True
        # Files of other nodes may become visible late.
        if time.monotonic() - since < self._executor.workflow.execution_settings.latency_wait:
            return True
        missing = [str(path) for path in info.job.output if not Path(path).exists()]
        what = f"left no {', '.join(missing)}" if missing else "did not write its outputs"
        self._fail(
            info.job,
            f"{_name(info.job, info.external_jobid)} is no longer known to Slurm and {what}. {RERUN}",
        )
        return False

    def _left_outputs(self, job: Any) -> bool:
        """Return whether all outputs exist and have been written since the job was submitted. Those after
        the first that was not are not looked at: a rule may have thousands."""
        before = self._before.get(id(job))
        if not before:  # no outputs, or submitted by an array, which does not pass run_job
            return False
        listed: set[Path] = set()
        for path, then in zip(map(Path, job.output), before, strict=True):
            if path.parent not in listed:
                listed.add(path.parent)
                with contextlib.suppress(OSError):
                    any(path.parent.iterdir())  # refreshes the cache of a network file system
            if (now := _stamp(path)) is None or now == then:
                return False
        return True

    def _has_ended(self, info: Any, state: str, nodes: str) -> bool:
        """Report a job in a final state; False for any other state."""
        if state == "COMPLETED" or (state in ENDS and self._did_all(info)):
            self._executor.report_job_success(info)
            return True
        if state not in (*ENDS, "FAILED"):
            return False
        log = Path(info.aux["slurm_logfile"])
        has_log = _is_there(log)
        if state == "FAILED" and has_log:
            self._executor.report_job_error(info, msg="", aux_logs=[str(log)])
        elif state == "FAILED":
            self._fail(info.job, self._no_log(info, nodes))
        else:
            who = self._canceller(info.external_jobid) if state == "CANCELLED" else ""
            words = ENDS[state].format(who=who, nodes=nodes or "which one, sacct may know")
            where = f"\nSlurm's log: {log}" if has_log else ""
            self._fail(info.job, f"{_name(info.job, info.external_jobid)} {words}{where}")
        return True

    def _did_all(self, info: Any) -> bool:
        """Return whether a job that Slurm has ended had done everything before: one that is out of time
        or preempted may do that in the seconds that it is left. Slurm 24.11 also calls PREEMPTED what
        completes after it was preempted once and requeued by Forge, in a partition that cancels.

        Forge's rules write their outputs last. Of a rule of the user the exit status of the batch step
        decides.
        """
        if not self._left_outputs(info.job):
            return False
        if self._is_of_forge(info):
            return True
        step = f"{info.external_jobid}.batch"
        return slurm.accounted_end(step, timeout_sec=SACCT_SEC) == "COMPLETED, exit code 0:0"

    def _is_of_forge(self, info: Any) -> bool:
        """Return whether the rules of a job are Forge's own, and write their outputs last."""
        return jobs.runs_in_batch_step(info.job.rules, self._executor.array_jobs)

    def _no_log(self, info: Any, nodes: str) -> str:
        """The error for a job that ended before its first node wrote Slurm's log."""
        host = slurm.expand(nodes)[0] if nodes else "NODE"
        return (
            f"{_name(info.job, info.external_jobid)} failed on {host} before it wrote a line: does it"
            f" see {Path.cwd()}?\n"
            f"Try: srun -w {host} --chdir=/ ls -d {Path.cwd()}\n"
            "Put the project on storage that all nodes see, or leave the node out: slurm.exclude in"
            " machine.yaml."
        )

    def _canceller(self, job_id: str) -> str:
        """Name of the user who cancelled the job, from accounting."""
        end = time.monotonic() + WHO_SEC
        while True:
            state = self._accounted(job_id)
            if match := re.search(r"by (\d+)", state):
                return f"user {user_name(int(match[1]))}"
            if time.monotonic() > end:
                return "somebody (accounting does not say who)"
            time.sleep(0.5)

    def _accounted(self, job_id: str) -> str:
        name = self._executor.run_uuid
        return slurm.accounted_state(job_id, name=name, timeout_sec=SACCT_SEC)

    def _fail(self, job: Any, words: str) -> None:
        """Print one error in place of Snakemake's report of each rule, which has no cause."""
        self._executor.logger.error(words)
        self._executor.workflow.scheduler.error_callback(job)

    def _tell(self, about: str, state: str, words: str) -> None:
        """Print a message when the state of a subject changes, and every ten minutes while it stays."""
        last, when = self._messages.get(about, ("", 0.0))
        if last != state or time.monotonic() - when >= TELL_AGAIN_SEC:
            self._executor.logger.warning(words)
            self._messages[about] = (state, time.monotonic())


def _why_it_waits(job: Any, queued: QueuedJob) -> str:
    """Words on a reason that lasts, or that a person can do something about; "" for others."""
    advice = lasting_advice(queued.id, queued.reason)
    lasts = bool(advice)
    # Outputs are in the directory of the run, or in its .allocation.
    for folder in dict.fromkeys(f for output in map(Path, job.output) for f in output.parents[:2]):
        bad_nodes = RunPaths(folder).bad_nodes
        if excluded := excluded_nodes(queued.reason, bad_nodes):
            names = ", ".join(
                f"{node.name} ({node.reason or 'added by hand'})" for node in excluded
            )
            advice = advice_on_excluded(queued.id, names, bad_nodes)
            break
    if lasts:
        return f"waits for a reason that does not pass by itself ({queued.reason}): {advice}"
    advice = advice or slow_advice(queued.reason)
    return f"waits ({queued.reason}): {advice}" if advice else ""


def _stamps(job: Any) -> list[object]:
    """Values that change with the outputs of a job; None for an output that does not exist."""
    return [_stamp(path) for path in map(Path, job.output)]


def _stamp(path: Path) -> object:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size


def _absent(job: Any) -> list[object]:
    """Value of `_stamps` for a job without any of its outputs."""
    return [None for _ in job.output]


def _is_there(path: Path) -> bool:
    """Return whether the file exists. Listing its directory refreshes the cache of a network file
    system."""
    return path.parent.is_dir() and path in path.parent.iterdir()


def _name(job: Any, job_id: str = "") -> str:
    """`job 12 (run base)` for a run's allocation, `job 13 (rule validate_run, run base)`."""
    rules = "" if job.is_group() else f"rule {job.rule.name}"
    members = job.jobs if job.is_group() else [job]
    runs = {dict(member.wildcards_dict).get("run", "") for member in members}
    words = [word for word in (rules, *(f"run {run}" for run in sorted(runs) if run)) if word]
    return f"{f'job {job_id}' if job_id else 'a job'} ({', '.join(words)})"
