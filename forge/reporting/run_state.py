"""The one judge of a run: its state, the reason, its log and the next command.

`forge status`, `forge show`, the report and the last lines of the workflow all ask here, so that a run
has the same state and the same reason in each of them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from forge.core import events, hooks
from forge.core.config import Ids
from forge.core.errors import DataError, ForgeError, OtherFormat
from forge.core.files import read_object_or_empty
from forge.core.paths import RunPaths, tokens_folder
from forge.core.records import BitsPerByte, Lock, PreflightResult, Validated, Validation
from forge.core.terminal import duration, one_line
from forge.reporting.log_errors import LoggedError, last_error, without_command
from forge.reporting.run_files import RunFiles
from forge.slurm import jobs, slurm
from forge.slurm.jobs import (
    QueuedJob,
    advice_on_excluded,
    excluded_nodes,
    lasting_advice,
    slow_advice,
)

State = Literal[
    "not started",
    "waiting",
    "running",
    "suspended",
    "stopping",
    "stopped",
    "cut off",
    "failed",
    "done",
    "finished",
    "validated",
    "invalid",
    "checkpoint missing",
    "unknown",
]
Tone = Literal["good", "bad", "busy", "open"]
Queue = Sequence[QueuedJob] | None  # Slurm's; None where it cannot be asked

_TONES: dict[State, Tone] = {
    "validated": "good",
    "finished": "good",
    "failed": "bad",
    "invalid": "bad",
    "cut off": "bad",
    "waiting": "busy",
    "running": "busy",
    "stopping": "busy",
}  # the rest: open

# On a terminal.
COLORS: dict[Tone, str] = {"good": "green", "bad": "red", "busy": "cyan", "open": "yellow"}

# How long squeue and sacct may take: an answer a little later is better than a wrong one.
ASK_SEC = 3.0

# No new step for this long, and for so many times the usual, is worth a look.
STALL_SEC = 60.0
STALL_TIMES = 10
# Imports, rendezvous, digests of shards and compiling take minutes on a cold file system, no more.
SLOW_START_SEC = 300.0

TRAINING = "training"  # the begin of the reason
RESUME = "rerun the command to resume"


@dataclass(frozen=True)
class RunState:
    """State of a run, with the reason and the next command."""

    run: str
    state: State
    reason: str
    """One line: what it does or waits for, or what ended it."""
    details: tuple[str, ...]
    """More of the reason, a line each: cause and fix of an error, failed checks."""
    next: str
    """What a person has to do: a command, or a sentence; "" where that is nothing."""
    log: Path | None
    """What to read: the report of a validated run, else the newest log of a subcommand that works for
    this run; None where all ran without --log."""
    step: int | None
    goal: int | None
    job: str
    """Slurm's job: the queued one with its nodes, else the last one; without Slurm the host."""
    finding: str = ""
    """The newest `hooks.Finding` of each plugin; "" without one. The reason has it, too."""

    @property
    def tone(self) -> Tone:
        """Tone of the state: good news, bad news, work under way, or open."""
        return _TONES.get(self.state, "open")

    @property
    def headline(self) -> str:
        """State, step and reason in one line."""
        at = "" if self.step is None else f" at step {self.step}"
        of = f" of {self.goal}" if at and self.goal else ""
        return f"{self.state}{at}{of}" + (f": {self.reason}" if self.reason else "")


class _Judgement(NamedTuple):
    """State of a run, with its reason and the next command."""

    state: State
    reason: str
    next: str = ""
    details: Sequence[str] = ()
    log: Path | None = None  # None: the newest


def ask_slurm(runs: Sequence[RunPaths]) -> tuple[Queue, str]:
    """Slurm's queue for `judge`, and a note where it does not answer. None without a cluster, also where
    only Slurm's packages are installed."""
    if not slurm.is_here():
        return None, ""
    # A run of a colleague in a shared folder is asked for as well.
    users = {os.getuid(), *(paths.root.stat().st_uid for paths in runs if paths.root.is_dir())}
    try:
        return jobs.read_queue(users, patience_sec=0, timeout_sec=ASK_SEC), ""
    except slurm.SlurmSilent as err:
        if slurm.NO_CLUSTER in err.what:
            return None, ""
        what = err.what.split("\n")[0]
        return None, f"note: {clipped(what)}; this is from the runs' files alone"


def judge(files: RunFiles, queue: Queue) -> RunState:
    """The state of a run. Raises nothing for what it finds: a record that cannot be read is the state
    `unknown`."""
    job = jobs.of_run(queue or (), files.paths.root.name, files.job_ids, Path.cwd())
    findings: list[hooks.Finding] = []
    try:
        verdict = _judged(files, job, queue)
        findings = hooks.findings(files.paths)
    except ForgeError as err:
        verdict = _Judgement("unknown", err.what, err.fix, [err.cause] if err.cause else ())
    report = files.paths.report
    is_reported = verdict.state == "validated" and report.exists()
    found = "; ".join(finding.text for finding in findings)
    advice = next((finding.next for finding in findings if finding.next), "")
    return RunState(
        run=files.paths.root.name,
        state=verdict.state,
        reason=one_line("; ".join(filter(None, (verdict.reason, found)))),
        details=tuple(map(one_line, verdict.details)),
        next=verdict.next or advice,
        log=report if is_reported else verdict.log or _newest_log(files),
        step=files.step,
        goal=files.goal,
        job=_where(files, job, verdict.state),
        finding=one_line(found),
    )


def _where(files: RunFiles, job: QueuedJob | None, state: State) -> str:
    if job:
        return f"{job.id} on {job.nodes}" if job.nodes else job.id
    if files.job_ids or state != "running":
        return "".join(files.job_ids)
    return files.lock.host if files.lock else ""


def _judged(files: RunFiles, job: QueuedJob | None, queue: Queue) -> _Judgement:
    if files.trouble:
        raise files.trouble
    if job and (job.is_waiting or job.state in _PAUSED):
        return _waiting(files, job) if job.is_waiting else _suspended(job)
    match _holder(files, job, queue):
        case "alive":
            return _held(files, job)
        # A job that only completes has no process left that would work on the run.
        case _ if job and job.state != "COMPLETING":
            return _between(files, job)
        case "unknown":
            since = duration(files.now - files.last_sign_of_life)
            who = f"its process on {files.lock and files.lock.host} cannot be asked from here"
            return _Judgement("unknown", f"{who}; last sign of life {since} ago")
        case "gone":
            verdict = _Judgement("cut off", "its process is gone", "rerun the command")
        case _:
            verdict = _ended(files)
    if verdict.state == "cut off":
        return verdict._replace(reason=verdict.reason + _slurm_says(files, queue))
    return verdict


def _slurm_says(files: RunFiles, queue: Queue) -> str:
    """End of the last job, from Slurm's accounting: more than files tell of a job that was killed."""
    if queue is None or not files.job_ids:
        return ""
    (job,) = files.job_ids
    end = slurm.accounted_end(job, timeout_sec=ASK_SEC)
    return f"; Slurm says of job {job}: {end}" if end else ""


def _holder(files: RunFiles, job: QueuedJob | None, queue: Queue) -> str:
    """State of the process that holds the lock: alive, gone, unknown; none where nobody holds it."""
    if files.lock is None:
        return "none"
    life = files.lock.process.life()
    if life == "unknown" and queue is not None and _is_of_this_cluster(files.lock):
        return "alive" if job and job.id == files.lock.slurm_job else "gone"
    return life


def _is_of_this_cluster(lock: Lock) -> bool:
    """Return whether the lock is that of a job in this Slurm's queue, where another one may have the same
    id."""
    with suppress(slurm.SlurmSilent):
        name = lock.cluster and slurm.cluster_name(patience_sec=0, timeout_sec=ASK_SEC)
        return name is not None and name == lock.cluster
    return False


# --- work under way --------------------------------------------------------------------------------


def _waiting(files: RunFiles, job: QueuedJob) -> _Judgement:
    text = f"{job.state} ({job.reason})"
    if job.submitted:
        text += f" for {duration(files.now - job.submitted)}"
    if job.start and job.start > files.now:
        text += f", expected to start in {duration(job.start - files.now)}"
    advice = lasting_advice(job.id, job.reason)
    text += "; it does not pass by itself" * bool(advice)
    if excluded := excluded_nodes(job.reason, files.paths.bad_nodes):
        names = ", ".join(node.name for node in excluded)
        advice = advice_on_excluded(job.id, names, files.paths.bad_nodes)
        return _Judgement("waiting", text, advice, [f"excluded: {node}" for node in excluded])
    return _Judgement("waiting", text, advice or slow_advice(job.reason))


# Slurm's states of a job whose processes are stopped for a while: by whom, and what ends that.
_PAUSED = {
    "SUSPENDED": (
        "by Slurm, for a job of higher priority or one that shares its nodes, or by an administrator",
        "wait; if it stays, ask your administrators for: scontrol resume {job}",
    ),
    "STOPPED": ("by a signal, from you or an administrator", "scancel --signal=CONT {job}"),
}


def _suspended(job: QueuedJob) -> _Judgement:
    reason, following = _PAUSED[job.state]
    return _Judgement("suspended", f"{job.state}: {reason}", following.format(job=job.id))


def _held(files: RunFiles, job: QueuedJob | None) -> _Judgement:
    """The state of a run that is locked by a process, or by a job that is in the queue."""
    if job and job.state == "COMPLETING":
        return _stopping(job)
    # Of an allocation by salloc Slurm names the login node, and no run.
    lacks_first = job and job.run and job.lacks_its_script
    if job and lacks_first and files.now - files.last_sign_of_life > STALL_SEC:
        return _without_first_node(job)
    return _working(files)


def _without_first_node(job: QueuedJob) -> _Judgement:
    """Slurm keeps a job with --no-kill so; Snakemake requeues it, where one waits for it."""
    what = (
        f"Slurm keeps job {job.id} on {job.nodes} without {job.batch_host}, on which it was started"
    )
    return _Judgement("cut off", what, f"scontrol requeue {job.id}")


def _stopping(job: QueuedJob) -> _Judgement:
    """Also the last moments of a command whose jobs were cancelled by Ctrl-C."""
    return _Judgement("stopping", f"Slurm is ending job {job.id}: cancelled, requeued or over")


def _between(files: RunFiles, job: QueuedJob) -> _Judgement:
    """The job runs and no subcommand holds the run: before the first of them, between two, or after."""
    since = job.start or files.now
    if completed := files.last(events.Completed, since=since):
        return _running(files, completed.then, completed.time, float("inf"))
    if not files.paths.stage.exists():
        what = "starting, or staging"
    elif not files.paths.preflight_pass.exists():
        what, since = "staged", files.paths.stage.stat().st_mtime
    else:
        what, since = "preflight passed", files.paths.preflight_pass.stat().st_mtime
    return _running(files, what, since)


def _running(
    files: RunFiles, what: str, since: float, patience: float = SLOW_START_SEC
) -> _Judgement:
    """Activity since then, and where to look when that is longer than it should be."""
    seconds = files.now - since
    look = f"forge logs {files.paths.root}" if seconds > patience else ""
    return _Judgement("running", f"{what} for {duration(seconds)}", look)


def _working(files: RunFiles) -> _Judgement:
    """Words for the subcommand that holds the lock, and for how long."""
    since = files.lock_since
    if files.lock and files.lock.command != "train":
        return _running(files, files.lock.command, since)
    # A second of grace: the lock's time is the file system's clock.
    event = files.last(events.Launch, events.Init, events.End, since=since - 1)
    began = event.time if event else since
    match event:
        case events.Init():
            return _training(files, began)
        case events.Launch() if files.program:
            return _running_program(files, began)
        case events.Launch():
            what = "starting ranks"
        case events.End():
            patience = float("inf") if event.state == "completed" else SLOW_START_SEC
            return _running(files, event.then, began, patience)
        case _:
            what = "starting"
    return _running(files, what, began)


def _running_program(files: RunFiles, began: float) -> _Judgement:
    """Another program runs, and may tell its steps."""
    if files.steps_of_launch:
        return _training(files, began)
    return _running(files, "the program runs", began, float("inf"))


def _training(files: RunFiles, began: float) -> _Judgement:
    """Training, or that no step has come for longer than steps, evaluation and saves usually take."""
    steps = files.steps_of_launch
    other = files.last(events.Eval, events.Save, since=began)
    last = max(began, other.time if other else 0, steps[-1].time if steps else 0)
    gaps = [after.time - before.time for before, after in pairwise(steps)]
    patience = max(STALL_SEC, STALL_TIMES * median(gaps)) if gaps else SLOW_START_SEC
    if files.now - last > patience:
        return _running(files, "no step", last, patience)
    if not steps:
        return _running(files, "first steps", began, float("inf"))
    return _Judgement("running", " ".join(filter(None, (TRAINING, files.shrunk))))


# --- the end of a run ------------------------------------------------------------------------------

_OF_TRAINING = ("train.log",)
# The log of a subcommand -> the event that tells of its failure.
_RECORDED_BY = {"preflight.log": events.Preflight, "validate.log": events.Validate}


def _ended(files: RunFiles) -> _Judgement:
    """The state of a run that nothing works on, by the last thing that happened to it."""
    verdict = _by_event(files)
    log = _newest_log(files)
    error = _unrecorded_error(files, log, verdict) if log else None
    if error is None and verdict.state == "not started":
        log, error = _failed_data(files)
    if log is None or error is None:
        return verdict
    subcommand = log.stem.partition("-")[0]
    more = () if error.is_traceback else error.lines[1:]
    look = f"forge logs {files.paths.root}" if log.parent == files.paths.logs else f"less {log}"
    lines = [f"{subcommand}: {without_command(error.headline)}", *more]
    return _failed(lines, look)._replace(log=log)


def _by_event(files: RunFiles) -> _Judgement:
    last, checked = files.last(events.Launch, events.End, events.Preflight), ""
    if isinstance(last, events.Preflight) and last.status == "ok":  # it ends nothing
        last, checked = files.last(events.Launch, events.End), "preflight passed, "
    match last:
        case None:
            return _not_trained(files, f"{checked}nothing has trained yet")
        case events.Preflight():
            return _preflight_failed(files, last)
        case events.Launch():
            return _Judgement("cut off", "no end was recorded", _first(files, RESUME))
        case events.End(state="completed"):
            return _completed(files)
        case events.End(state="failed"):
            look = f"forge logs {files.paths.root}"
            # Refused at once, as it is, with the same message (train.refuse_known_failure).
            other = "change the config under a new run name: " * last.fails_again
            return _failed(last.reason.splitlines(), other + look)
    return _Judgement(last.state, last.reason.split("\n")[0], _first(files, RESUME))


def _not_trained(files: RunFiles, reason: str) -> _Judgement:
    parent = _from_parent(files)
    if held := files.snakemake:
        who = f"its command (pid {held.pid} on {held.host})"
        if parent.endswith(_NOT_ENDED):
            return _Judgement("waiting", f"{reason}{parent}: {who} starts it then")
        return _Judgement("running", f"{reason}{parent}: {who} makes what it needs")
    return _Judgement("not started", f"{reason}{parent}", _first(files, "run the target train"))


_NOT_ENDED = " has not ended"


def _from_parent(files: RunFiles) -> str:
    """Words for the run that this one starts from, and whether that has ended."""
    parent = files.config.get("parent")
    if not isinstance(parent, str):
        return ""
    name = parent.partition("@")[0]
    ended = RunPaths(files.paths.root.parent / name).trained.exists()
    return f", it starts from {parent}" + ("" if ended else f", and {name}{_NOT_ENDED}")


def _first(files: RunFiles, following: str) -> str:
    """Advice, after the STOP file is removed where there is one."""
    stop = files.paths.stop
    return f"rm {stop}, then {following}" if stop.exists() else following


def _completed(files: RunFiles) -> _Judgement:
    step, goal = files.step, files.goal
    if goal is not None and step is not None and step < goal:
        return _Judgement(
            "stopped", f"step {step} was its goal, now it is {goal}", "rerun the command"
        )
    validation = Validation.read_if_there(files.paths.validation)
    if validation and validation.step == step and validation.status == "invalid":
        reason, *more = validation.reasons
        examine = f"forge validate {files.paths.root} --all"
        return _Judgement("invalid", reason, examine, more)
    validated = Validated.read_if_there(files.paths.validated)
    is_validated = validated is not None and validated.step == step
    if step is not None and (trouble := _of_checkpoint(files, step)):
        before = "it was validated; " if is_validated else ""
        return _Judgement("checkpoint missing", before + trouble.what, trouble.fix)
    if validated and is_validated:
        return _validated(validated, validation)
    return _Judgement("done", "not validated yet", f"forge validate {files.paths.config}")


def _of_checkpoint(files: RunFiles, step: int) -> DataError | None:
    """Why a run that has completed does not have its checkpoint any more. None where it does, and for a
    program without checkpoints. Raises OtherFormat, and UnfitError where the disk reports an error."""
    try:
        files.checkpoints.check_still_there(step)
    except OtherFormat:
        raise
    except DataError as err:
        return err
    return None


def _validated(validated: Validated, validation: Validation | None) -> _Judgement:
    """With the loss, or what was checked of it without one: of a program that may be nothing."""
    if validated.loss is not None:
        bpb = BitsPerByte.of(validated)
        in_bits = f", {bpb}" if bpb else ""
        return _Judgement("validated", f"validation loss {validated.loss:.3f}{in_bits}")
    if validation is None or validation.step != validated.step:
        return _Judgement("validated", "")
    if not validation.checks:
        return _Judgement("finished", "no checkpoints configured: nothing to validate")
    names = dict.fromkeys(check.name for check in validation.checks)
    return _Judgement("validated", f"checked: {', '.join(names)}")


def _failed(lines: Sequence[str], look: str) -> _Judgement:
    """lines: of the error. look: the command that shows more of it."""
    reason, *more = lines
    return _Judgement("failed", reason, look, [" ".join(line.split()) for line in more])


def _preflight_failed(files: RunFiles, event: events.Preflight) -> _Judgement:
    names = ", ".join(dict.fromkeys(event.failed))
    try:
        result = PreflightResult.read_if_there(files.paths.preflight)
    except DataError as err:
        details = [err.what]
    else:
        checks = result.all_checks if result else []
        failed = [(where, check) for where, check in checks if check.status == "fail"]
        details = [f"{where}, {c.name}: {c.message}. Fix: {c.fix}" for where, c in failed]
    table = f"cat {files.paths.preflight_table}"
    return _Judgement("failed", f"preflight: {names}" if names else "preflight", table, details)


def _unrecorded_error(files: RunFiles, log: Path, verdict: _Judgement) -> LoggedError | None:
    """The error that the newest log ends with, where it is newer than all that was recorded and says
    something else: of staging, or of training before its first launch, no event tells."""
    recorded = files.log[-1].time if files.log else 0.0
    # A second of grace: times in logs are whole seconds, and clocks of a host and a file system differ.
    error = last_error(log)
    if error is None or error.time <= recorded - 1:
        return None
    if log.name in _OF_TRAINING and verdict.reason in error.headline:
        return None
    is_recorded = files.log and isinstance(files.log[-1], _RECORDED_BY.get(log.name, ()))
    return None if is_recorded else error


def _newest_log(files: RunFiles) -> Path | None:
    return max(_logs(files), key=lambda log: log.stat().st_mtime, default=None)


def _logs(files: RunFiles) -> list[Path]:
    """Logs of the subcommands that worked for this run, on its tokenizer and tokens too. Those of ranks
    have a dot in their names."""
    own = [log for log in files.paths.logs.glob("*.log") if "." not in log.stem]
    return [log for log in own + _logs_of_data(files) if log.is_file() and log.stat().st_size]


def _logs_of_data(files: RunFiles) -> list[Path]:
    """Paths that logs may have of the subcommands that make this run's data, shared with other runs."""
    data, ids = data_folder(files), ids_of(files.config)
    if data is None:
        return []
    made = [("tokenizer", ids.tokenizer), ("model", ids.model)]
    for one in [ids.tokens, *ids.sources.values()]:
        # The files of a source from a hub have an id that only the config of its tokens tells.
        of_tokens = ids_of(read_object_or_empty(tokens_folder(data, one) / "config.json"))
        made += [("inputs", of_tokens.inputs), ("tokenize", one), ("sources", one)]
    made.append(("inputs", ids.inputs))
    return [data / f"logs/{command}-{artifact}.log" for command, artifact in made if artifact]


def data_folder(files: RunFiles) -> Path | None:
    """`data` of the run's config. A relative path is relative to its project, which `results` tells, and
    not to the directory from which somebody asks. None where neither is known."""
    results, data = (Path(files.config.get(key) or ".") for key in ("results", "data"))
    if data == Path():
        return None
    folder, names = files.paths.root.absolute().parent, results.parts
    if data.is_absolute() or results.is_absolute():
        return data
    return (
        Path(*folder.parts[: -len(names)]) / data if folder.parts[-len(names) :] == names else None
    )


def ids_of(config: dict[str, Any]) -> Ids:
    """The content ids in a config; none where they are not ids."""
    try:
        return Ids.model_validate(config.get("ids", {}))
    except ValidationError:
        return Ids()


def _failed_data(files: RunFiles) -> tuple[Path | None, LoggedError | None]:
    """The first subcommand that makes what the run reads and has failed, with its log and its error: the
    log of another one, such as `forge config`, may be newer."""
    for log in _logs_of_data(files):
        if log.is_file() and (error := last_error(log)):
            return log, error
    return None, None


def clipped(text: str, width: int = 90) -> str:
    """The text, with an ellipsis for what is beyond the width."""
    return text if len(text) <= width else text[: width - 1] + "…"
