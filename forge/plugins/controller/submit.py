"""`forge submit`: start the workflow as a small Slurm job, and stop it."""

from __future__ import annotations

import functools
import math
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from forge.core import hooks
from forge.core.errors import ConfigError, DataError, ForgeError, TrainingError, UnfitError
from forge.core.machine import ControllerSettings, load_machine
from forge.core.paths import WORKFLOW
from forge.core.terminal import one_line, say
from forge.hosts.lock import lock
from forge.plugins.controller import controller_job
from forge.plugins.controller.places import CHECKS, CONTROLLERS, SUBMIT_CHECK, ControllerPaths
from forge.plugins.controller.records import Controller, ControllerState, SubmitCheck
from forge.plugins.controller.shell import SET_IN_JOBS
from forge.slurm import adopt, jobs, slurm, submission
from forge.slurm.partitions import Partition, read_partitions
from forge.slurm.sbatch import Request, batch_line, excluding

DAY_MIN = 24 * 60
WARN_SEC = 300  # before its time limit; a quarter of a shorter one
REPORT_SEC = 30.0  # how long a started controller has to say that it may submit
STOP_SEC = 120.0  # for the controller to end
HAS_ENDED = ("Invalid job id", "already completing or completed")  # in errors of scancel
AGAIN_SEC = 10.0  # a job that was about to be requeued may come back
SAVE_SEC = 600.0  # for its jobs: training commits a checkpoint
POLL_SEC = 0.5
SUBMIT_SEC = 60.0
# Rules that download, or read what nodes may not see: made here, before anything is submitted. By one
# command each, since --until leaves out all that comes after any of its rules.
HERE = (("inputs",), ("tokenizer", "model"))
# Of what Snakemake prints before an error: how and where it was called, all its options.
NOISE = re.compile(
    r"\s*SNAKEMAKE\n=+\n.*?Config MD5: \S+\n|^usage: .*?(?=^\S+: error:)"
    r"|^(?:Using profile|Building DAG of jobs)[^\n]*\n?",
    re.DOTALL | re.MULTILINE,
)
MOST_SAID = 4000
SNAKEFILES = ("workflow/Snakefile", "Snakefile")
# Options of Snakemake with which nothing would be run, or elsewhere.
NOT_TO_SUBMIT = {
    "-n": "shows the plan only: snakemake -n",
    "--dry-run": "shows the plan only: snakemake --dry-run",
    "--dryrun": "shows the plan only: snakemake --dryrun",
    "-d": "change to the project's directory instead",
    "--directory": "change to the project's directory instead",
}
# -n or -d by itself or behind letters that take no value, as in -pn.
SHORT = re.compile("-[aDfFhklpStv]*([nd])")
ELSEWHERE = (
    "run Snakemake on the login node inside tmux; or set slurm.controller.partition in machine.yaml to"
    " a partition whose nodes may submit (where the site has scrontab: that of its jobs)"
)


def submit(command: Sequence[str]) -> None:
    """Submit a job that runs `snakemake COMMAND` until its targets are made, or it fails.

    Returns when the job has started and may submit, or waits in the queue. Raises ConfigError for a
    command that Snakemake or Slurm would refuse, UnfitError where another controller looks after one of
    the runs, and where nodes may not submit.
    """
    slurm.refuse_missing("sbatch", "squeue", "scontrol")
    _refuse_words(command)
    _refuse_elsewhere(command)
    CONTROLLERS.mkdir(parents=True, exist_ok=True)
    with lock(WORKFLOW, "submit"):
        check = _checked(command)
        if not check.rules:
            say("nothing to be done: all targets are made")
            return
        controller_job.refuse_living(check.runs, check.shared)
        machine = load_machine(check.machine)
        if machine.slurm.when_running == "stop":
            name = adopt.job_name(check.runs, check.submitted)
            jobs.refuse_queued(check.runs, {job.id for job in adopt.adoptable(name)})
        request = request_of(machine.slurm.controller, check, read_partitions())
        submission.check([request], say)
        _make_here(command, check)
        record = _submitted(command, check, request)
        controller_job.forget_ended(record)
    _report(record)


def _refuse_words(command: Sequence[str]) -> None:
    for word in command:
        short = SHORT.match(word)
        name = f"-{short[1]}" if short else word.partition("=")[0]
        if reason := NOT_TO_SUBMIT.get(name):
            raise ConfigError(f"forge submit does not take {word}", fix=reason)


def _refuse_elsewhere(command: Sequence[str]) -> None:
    """ConfigError in a directory without a workflow, before anything is written there."""
    named = any(word.startswith(("-s", "--snakefile")) for word in command)
    if not named and not any(map(Path.is_file, map(Path, SNAKEFILES))):
        raise ConfigError(
            f"{Path.cwd()} has no workflow/Snakefile", fix="change to the project's directory"
        )


# --- on the login node -------------------------------------------------------------------------------


def _snakemake(arguments: Sequence[str], **environ: str) -> list[str]:
    """Words of a Snakemake command with more variables in its environment."""
    variables = [f"{name}={value}" for name, value in environ.items()]
    return ["env", *variables, sys.executable, "-m", "snakemake", *arguments]


def _checked(command: Sequence[str]) -> SubmitCheck:
    """Result of a dry run of the command. ConfigError where it fails, or a start would be refused."""
    SUBMIT_CHECK.unlink(missing_ok=True)
    line = _snakemake([*command, "--dry-run"], **{CHECKS: "1"})
    done = subprocess.run(line, capture_output=True, text=True, check=False, errors="replace")
    if done.returncode:
        said = NOISE.sub("", f"{done.stdout}\n{done.stderr}").strip()
        raise ConfigError(f"snakemake refuses the command:\n{said[-MOST_SAID:]}")
    check = SubmitCheck.read_if_there(SUBMIT_CHECK)
    if check is None:
        raise ConfigError(
            f"`snakemake {' '.join(command)}` runs no rule", fix="name a target, such as train"
        )
    if check.refused:
        raise _error(check.code)(check.refused)
    return check


def _error(code: int) -> type[ForgeError]:
    kinds = (UnfitError, TrainingError, DataError)
    return next((kind for kind in kinds if kind.code == code), ConfigError)


def _make_here(command: Sequence[str], check: SubmitCheck) -> None:
    """Run the rules that need the network, which nodes do not have. UnfitError where one fails."""
    *first, last = HERE
    for rules in (*first, (*last, *hooks.rules_here())):
        wanted = [rule for rule in rules if rule in check.rules]
        if not wanted:
            continue
        say(f"on this machine, which has a network: {', '.join(wanted)}")
        line = _snakemake([*command, "--until", *wanted], **{adopt.CONTROLLED: check.submitted})
        if status := subprocess.run(line, stdin=subprocess.DEVNULL, check=False).returncode:
            raise UnfitError(
                f"{', '.join(wanted)}: Snakemake ended with status {status}; nothing was submitted",
                fix="see its messages above; then rerun the same command",
            )


# --- the job ---------------------------------------------------------------------------------------


class ControllerRequest(Request):
    """The request of the controller's job, which is no rule's."""

    @property
    def name(self) -> str:
        return "the controller"

    @property
    def profile_keys(self) -> str:
        return "slurm.controller in machine.yaml, or default-resources"


def request_of(
    settings: ControllerSettings, check: SubmitCheck, known: Mapping[str, Partition]
) -> Request:
    """Request of the controller's job. Raises UnfitError where its nodes may not submit the jobs, and as
    `excluding`."""
    partition = settings.partition or check.partition
    account = settings.account or check.account
    qos = "" if settings.partition else check.qos  # another partition may not allow it
    bare = Request(rules=("",), minutes=0, partition=partition)
    own = submission.asked_partitions(bare, known)
    longest = max((place.max_minutes for place in own), default=float(DAY_MIN))
    minutes = settings.runtime or int(min(DAY_MIN, max(longest, 1)))
    warn_sec = min(WARN_SEC, minutes * 60 // 4)
    forbidden = sorted(_not_submitting(own, check, known))
    options = [
        *([f"--qos={qos}"] if qos else []),  # before the user's options, which may name another one
        # Before the others, so that they change nothing that Forge relies on.
        *shlex.split(excluding(settings.options, forbidden)),
        *([f"--account={account}"] if account else []),
        *([f"--partition={partition}"] if partition else []),
        *("--export=ALL", f"--time={minutes}", f"--signal=B:USR1@{warn_sec}"),
        *("--nodes=1", "--ntasks=1", "--cpus-per-task=1", f"--mem={settings.mem_mb}"),
        *(f"--job-name={controller_job.JOB_NAME}", "--requeue"),
    ]
    return ControllerRequest(
        rules=("controller",),
        minutes=minutes,
        account=account,
        partition=partition,
        mem_mb=settings.mem_mb,
        options=tuple(options),
    )


def _not_submitting(
    own: Sequence[Partition], check: SubmitCheck, known: Mapping[str, Partition]
) -> set[str]:
    """The nodes of these partitions that may not submit to one that the workflow uses (AllocNodes).
    UnfitError where these are all."""
    nodes = {node.name for place in own for node in place.nodes}
    for _, names in check.requests:
        asked = Request(rules=("",), minutes=0, partition=names)
        for place in submission.asked_partitions(asked, known):
            if place.submitting and not nodes & place.submitting:
                raise UnfitError(
                    f"no node of partition {', '.join(one.name for one in own)} may submit jobs to"
                    f" {place.name} (AllocNodes={','.join(sorted(place.submitting))})",
                    cause="the site lets jobs be submitted from other machines only",
                    fix=ELSEWHERE,
                )
            if place.submitting:
                nodes &= place.submitting
    return {node.name for place in own for node in place.nodes} - nodes


def _submitted(command: Sequence[str], check: SubmitCheck, request: Request) -> Controller:
    """Submit the job, and record it. The job waits for the record."""
    cluster, now = slurm.cluster_name(), time.time()
    line = batch_line(
        controller_job.JOB_NAME,
        ControllerPaths("%j").log,
        request.options,
        [sys.executable, "-m", "forge", "controller"],
    )
    output, trouble = slurm.run(line, timeout_sec=SUBMIT_SEC, submits=True)
    if trouble:
        raise UnfitError(
            f"the controller could not be submitted: {trouble}",
            fix="correct slurm.controller in machine.yaml, or default-resources of the profile",
        )
    shell = {name: os.environ[name] for name in SET_IN_JOBS if name in os.environ}
    record = Controller(
        job=re.split(r"[;\s]", output.strip())[0],
        cluster=cluster,
        command=list(command),
        check=check,
        environment=shell,
        time=now,
    )
    record.write(ControllerPaths(record.job).record)
    return record


def _report(record: Controller) -> None:
    """Say what the job does, once it has begun or waits. UnfitError where it may not submit."""
    end = time.monotonic() + REPORT_SEC
    while not (state := _state_of(record)) and time.monotonic() < end:
        time.sleep(POLL_SEC)
    if state and state.phase == "refused":
        raise UnfitError(
            f"the controller, job {record.job}, may not submit jobs: {state.reason}", fix=ELSEWHERE
        )
    status = controller_job.status_of(controller_job.ControllerJob(record, state))
    for text in status.lines():
        say(text)
    say(f"log: {status.log}; see forge status; end it and its jobs with forge submit --stop")


def _state_of(record: Controller) -> ControllerState | None:
    """State that the job has recorded; None before it has begun."""
    with suppress(DataError):
        return ControllerState.read(ControllerPaths(record.job).state)
    return None


# --- the end ---------------------------------------------------------------------------------------


def stop(job: str = "") -> None:
    """End this controller, then its jobs: training commits a checkpoint. Returns when they have ended.
    job: "" for the only one that lives.

    Raises UnfitError where no controller was submitted here, it is of another cluster, or a job has not
    ended in time; ConfigError where several live.
    """
    slurm.refuse_missing("scancel", "squeue")
    controller = _to_stop(job)
    record, state = controller.record, controller.state
    # Before its jobs: it would take their end for a failure.
    if lives := controller_job.listed(record.job) is not None:
        say(f"controller, job {record.job}: told to end")
        alive = functools.partial(controller_job.listed, record.job)
        _cancel([record.job], lambda: alive() is not None, STOP_SEC, again_sec=AGAIN_SEC)
    if left := [one.id for one in adopt.adoptable(controller.jobs_name)]:
        say(f"job {', '.join(left)}: told to end; training commits a checkpoint first")
        _cancel(left, controller.has_jobs, SAVE_SEC)
    if not lives and not left:
        text = controller_job.status_of(controller).lines()[0]
        say(f"nothing to stop: {text}")
        return
    told = state.told if state else []
    ControllerState(job=record.job, phase="stopped", time=time.time(), told=told).write(
        ControllerPaths(record.job).state
    )
    say(f"stopped; {controller.command} resumes")


def _to_stop(job: str) -> controller_job.ControllerJob:
    """The controller that is meant: this one, the only one that lives, or the last one."""
    found = controller_job.read()
    if not found:
        raise UnfitError(
            f"nothing to stop: forge submit has submitted nothing in {Path.cwd()}",
            fix="change to the project's directory",
        )
    if job:
        named = [controller for controller in found if controller.record.job == job]
        if not named:
            raise ConfigError(
                f"job {job} is no controller of {Path.cwd()}",
                fix=f"one of {', '.join(controller.of_runs for controller in found)}",
            )
        chosen = named[0]
    else:
        living = [one for one in found if one.listed() or one.has_jobs()]
        if len(living) > 1:
            raise ConfigError(
                f"{len(living)} controllers live: {', '.join(one.of_runs for one in living)}",
                fix=f"name the job: forge submit --stop {living[0].record.job}",
            )
        unknown = [one for one in found if not living and one.elsewhere()]
        chosen = (living or unknown or found[-1:])[0]
    if not chosen.listed() and (why := chosen.elsewhere()):
        raise UnfitError(
            f"{chosen.of_runs} cannot be stopped from here: {why}",
            cause="several clusters share this directory, and each knows its own jobs only",
            fix=f"on the other cluster: forge submit --stop {chosen.record.job}",
        )
    return chosen


def _cancel(
    ids: Sequence[str],
    live: Callable[[], bool],
    limit_sec: float,
    again_sec: float = math.inf,
) -> None:
    """Cancel the jobs, after this time once more, and wait until none of them lives. UnfitError where
    Slurm refuses, and after limit_sec."""
    begin = told = time.monotonic()
    _scancel(ids)
    while live():
        if time.monotonic() - begin > limit_sec:
            raise UnfitError(
                f"job {', '.join(ids)} has not ended within {limit_sec:g} s",
                cause="a node does not respond, or training still commits its checkpoint",
                fix=f"squeue --jobs={','.join(ids)}; then forge submit --stop again",
            )
        if time.monotonic() - told > again_sec:
            told = time.monotonic()
            _scancel(ids)
        time.sleep(POLL_SEC)


def _scancel(ids: Sequence[str]) -> None:
    try:
        slurm.ask("scancel", *ids)
    except slurm.Refused as err:
        if not any(words in str(err) for words in HAS_ENDED):
            raise UnfitError(
                f"scancel {' '.join(ids)}: {one_line(str(err))}",
                cause="another user has submitted it",
                fix="ask that user, whom `squeue` names",
            ) from None
