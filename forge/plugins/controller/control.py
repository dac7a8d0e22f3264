"""The controller: what the job of `forge submit` runs. Keeps one Snakemake alive until it ends by itself.

Before the time limit of its job the controller kills Snakemake, whose jobs continue, and requeues itself;
Slurm requeues it after the loss of its node. The next Snakemake takes the jobs back (slurm/adopt).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from forge.core.errors import DataError, ForgeError, TrainingError, UnfitError
from forge.core.machine import load_machine
from forge.core.process import slurm_start_variable, stop_with_parent
from forge.core.terminal import say
from forge.plugins.controller.notify import Notifier, events_of, states_of
from forge.plugins.controller.places import ControllerPaths
from forge.plugins.controller.records import Controller, ControllerPhase, ControllerState
from forge.plugins.controller.shell import outside_of_job
from forge.slurm import adopt, slurm

# Else a Snakemake that was killed leaves its lock, and outputs that the next one refuses.
AFTER_A_KILL = ("--nolock", "--rerun-incomplete")
RECORD_SEC = 60.0  # `forge submit` writes its record right after sbatch
LOOK_SEC = 30.0  # between two looks at the states of the runs
PAUSE_SEC = 0.5
MAX_KILLS = 2  # of Snakemake, in a row
LONG_SEC = 600.0  # a Snakemake that lived for so long had made progress
REQUEUE_TRIES = 3
END_SEC = 180.0  # Slurm ends a requeued job within its KillWait plus a scheduling round
TEST_SEC = 60.0
# What Slurm says where a node may not submit (AllocNodes), or the user may not there.
DENIED = ("denied", "not permitted", "Invalid partition name")


def control() -> None:
    """Run Snakemake until its targets are made or it fails, over all starts of this job.

    Raises ForgeError at any end but the good one.
    """
    job_id = slurm.this_job_id()
    if job_id is None:
        raise UnfitError(
            "the controller runs in the job of `forge submit` only", fix="forge submit"
        )
    received = _catch_signals()
    _Control(_await_record(job_id), received).run()


def _catch_signals() -> list[int]:
    """The signals that will have come."""
    received: list[int] = []
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda n, _: received.append(n))
    return received


def _await_record(job_id: str) -> Controller:
    """The record of this job. UnfitError where the command that submitted it wrote none."""
    end = time.monotonic() + RECORD_SEC
    while time.monotonic() < end:
        with suppress(DataError):
            return Controller.read(ControllerPaths(job_id).record)
        time.sleep(PAUSE_SEC)
    raise UnfitError(
        f"there is no {ControllerPaths(job_id).record} of this job",
        cause="`forge submit` was killed right after it had submitted the job",
        fix="rerun forge submit",
    )


class _Control:
    def __init__(self, record: Controller, received: list[int]) -> None:
        self._record, self._received = record, received
        self._paths = ControllerPaths(record.job)
        self._restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        machine = load_machine(record.check.machine)
        self._notifier = Notifier(machine.notify.command)
        self._notifies = bool(machine.notify.command)
        self._looked = time.monotonic()
        told: list[str] = []
        with suppress(DataError):  # none yet
            told = ControllerState.read(self._paths.state).told
        self._state = ControllerState(
            job=record.job, phase="running", time=time.time(), starts=self._restarts + 1, told=told
        )

    def run(self) -> None:
        if reason := may_not_submit(self._record.check.requests):
            self._end("refused", reason)
        self._state.write(self._paths.state)
        kills = 0
        while True:
            began = time.monotonic()
            status = self._run_snakemake()
            if status is None:
                self._end_as_told()
                return
            if status >= 0:
                self._finish(status)
                return
            kills = kills + 1 if time.monotonic() - began < LONG_SEC else 1
            what = f"Snakemake was killed by signal {-status}"
            if kills > MAX_KILLS:
                self._end("failed", f"{what}, {kills} times in a row: out of memory?")
            say(f"{what}: it is started again, and takes its jobs back")

    # --- Snakemake ---------------------------------------------------------------------------------

    def _run_snakemake(self) -> int | None:
        """Its exit status, minus the signal that killed it; None where this job was told to end."""
        if not self._wait_for_slurm():
            return None
        line = [sys.executable, "-m", "snakemake", *self._record.command, *AFTER_A_KILL]
        process = subprocess.Popen(
            line,
            env=environment(self._record),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            # Where Slurm does not track processes by cgroups, it would outlive a killed controller.
            preexec_fn=lambda: stop_with_parent(signal.SIGKILL),  # noqa: PLW1509  no threads
        )
        try:
            while (status := process.poll()) is None and not self._received:
                self._look()
                time.sleep(PAUSE_SEC)
            return status
        finally:
            # Not by a signal that it would understand: it would cancel its jobs. Rules on this node, in
            # its process group, end with it.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _wait_for_slurm(self) -> bool:
        """Wait until Slurm answers, without which Snakemake ends at once; False where told to end."""
        while not self._received:
            if not (trouble := slurm.controller_trouble()):
                return True
            say(f"waiting for Slurm: {trouble}")
            time.sleep(5)
        return False

    # --- ends --------------------------------------------------------------------------------------

    def _finish(self, status: int) -> None:
        self._look(ended=True)
        if status == 0:
            self._end("done")
        else:
            self._end("failed", f"Snakemake ended with status {status}: see {self._paths.log}")

    def _end_as_told(self) -> None:
        if self._received[0] == signal.SIGUSR1:
            what = "the time limit is near, or this job is preempted"
            say(f"{what}: it is requeued; the jobs of the workflow continue")
            self._requeue()
        elif self._goes_back():
            # Slurm requeues a preempted job only if its script succeeds.
            say(
                "Slurm takes this node away, and starts this job again; the workflow's jobs continue"
            )
        else:
            self._end("cancelled", "the jobs of the workflow continue")

    def _goes_back(self) -> bool:
        """Return whether Slurm requeues this job, as after a preemption."""
        with suppress(slurm.SlurmSilent):
            now = slurm.show_job(self._record.job)
            return bool(
                now and (now.is_preempted or now.is_waiting or now.restarts > self._restarts)
            )
        return False

    def _requeue(self) -> None:
        refusal = ""
        for _ in range(REQUEUE_TRIES):
            refusal = slurm.requeue(self._record.job, self._restarts)
            if not refusal:
                self._wait_for_the_end()
                return
            say(f"not requeued yet: {refusal}")
            time.sleep(5)
        self._end("failed", f"Slurm does not requeue this job: {refusal}")

    def _wait_for_the_end(self) -> None:
        """Wait for the SIGTERM of the requeue: a job whose script had ended before is not requeued."""
        end = time.monotonic() + END_SEC
        while signal.SIGTERM not in self._received and time.monotonic() < end:
            time.sleep(0.1)

    def _end(self, phase: ControllerPhase, reason: str = "") -> None:
        """Record the end, tell it, and leave. Raises ForgeError unless all is done."""
        self._note(phase=phase, reason=reason, time=time.time())
        event = {"event": "controller ended", "state": phase, "message": reason}
        self._tell("controller", {**event, "job": self._record.job})
        self._notifier.finish()
        errors: dict[str, type[ForgeError]] = {"failed": TrainingError, "done": ForgeError}
        if phase != "done":
            raise errors.get(phase, UnfitError)(f"{phase}: {reason}")

    # --- what people are told ----------------------------------------------------------------------

    def _look(self, *, ended: bool = False) -> None:
        """Every LOOK_SEC, and at the end, tell of runs that have ended or need a person."""
        self._notifier.reap()
        if not self._notifies or (time.monotonic() - self._looked < LOOK_SEC and not ended):
            return
        self._looked = time.monotonic()
        states = states_of(self._record.check.runs, self._record.time)
        for key, event in events_of(states, ended=ended):
            self._tell(key, event)

    def _tell(self, key: str, event: dict[str, Any]) -> None:
        """Once for each key, also over restarts: it is noted before the call."""
        if key not in self._state.told:
            self._note(told=[*self._state.told, key])
            self._notifier.call(event)

    def _note(self, **changes: Any) -> None:
        self._state = self._state.model_copy(update=changes)
        self._state.write(self._paths.state)


def environment(record: Controller) -> dict[str, str]:
    """The environment of Snakemake: as on the login node, so that its plugin does not take this job for
    one that Snakemake has submitted."""
    return {
        **outside_of_job(record.environment),
        **slurm_start_variable(),
        adopt.CONTROLLED: record.check.submitted,
    }


def may_not_submit(requests: Sequence[Sequence[str]]) -> str:
    """Why this node may not submit the jobs of the workflow; "" where it may. requests: account and
    partition of each, "" for Slurm's default."""
    try:
        slurm.refuse_missing("sbatch", "squeue", "scontrol")
    except UnfitError as err:
        return err.what
    for account, partition in requests:
        named = [f"--account={account}"] if account else []
        named += [f"--partition={partition}"] if partition else []
        line = ["sbatch", "--test-only", "--time=1", *named, "--wrap=true"]
        trouble = slurm.run(line, timeout_sec=TEST_SEC, submits=True)[1]
        if any(sign in trouble for sign in DENIED):
            return f"sbatch from this node to partition {partition or '(default)'}: {trouble}"
    return ""
