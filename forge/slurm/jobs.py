"""The jobs in Slurm's queue, the runs that they belong to, and advice on those that stay pending."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from forge.core import hooks
from forge.core.errors import UnfitError
from forge.slurm import exclude, slurm

ALLOCATION = "allocation"  # what the groups of rules in a run's job are called
TRAIN_RULE = "train_run"
ALLOCATION_RULES = ("stage_run", "preflight_run", TRAIN_RULE)
# Those that take one task.
NODE_RULES = ("tokenize", "validate_run", "export_run")
FORMAT = "%i|%T|%r|%N|%B|%V|%S|%k|%Z"  # man squeue


def no_steps(_: Any) -> Path | None:
    """No file, as for a workflow of others: all jobs of it need Snakemake."""
    return None


# From a job that Snakemake submits to the file of its commands. Forge's workflow sets it, to
# forge.flow.batch_steps.write_steps; the executor is that of workflows of others, too.
write_steps: Callable[[Any], Path | None] = no_steps


def is_allocation(rules: Iterable[str]) -> bool:
    """Return whether a job of these rules is the allocation of a run, in which rules start ranks."""
    names = set(rules)
    return TRAIN_RULE in names or (bool(names) and names <= set(ALLOCATION_RULES))


def runs_in_batch_step(rules: Iterable[str], in_arrays: Collection[str]) -> bool:
    """Return whether the Snakemake of a job's batch script runs these rules itself. Rules of a user need
    the second one that `slurm-jobstep` starts, for a part of what the job has, and start 2 s later; the
    tasks of an array need it, too. in_arrays: rules that are submitted as arrays, or "all"."""
    names = set(rules)
    if {"all", *names} & set(in_arrays):
        return is_allocation(names)
    return is_allocation(names) or (bool(names) and names <= {*NODE_RULES, *hooks.rules_on_nodes()})


@dataclass(frozen=True)
class QueuedJob:
    """A job as listed by squeue. Times in seconds since the epoch."""

    id: str
    state: str
    reason: str  # why it is pending
    nodes: str  # as Slurm writes them, such as node[01-02]; "" while it is pending
    batch_host: (
        str  # the node of its batch script; of salloc the login node; n/a while it is pending
    )
    submitted: float | None
    start: float | None  # of a pending job, the start that Slurm expects
    run: str | None  # for which Snakemake submitted it
    folder: Path  # from which it was submitted
    comment: str = ""

    @property
    def is_living(self) -> bool:
        """Return whether processes of the job may still run."""
        return slurm.is_living(self.state)

    @property
    def is_waiting(self) -> bool:
        return self.state in slurm.WAITING

    @property
    def lacks_its_script(self) -> bool:
        """Return whether the job runs without the node of its batch script, which Slurm has taken from
        it. An salloc job has no batch script: true where it was started on a login node."""
        return self.state in slurm.RUNNING and self.batch_host not in slurm.expand(self.nodes)


def rules_of(comment: str) -> frozenset[str]:
    """The rules of an allocation that was submitted with this comment."""
    run = run_of(comment)
    rest = comment.partition(f"{ALLOCATION}-{run}_")[2] if run else ""
    return frozenset(rule for rule in ALLOCATION_RULES if rule in rest)


def run_of(comment: str) -> str | None:
    """The run that an allocation was submitted for, from the comment that the executor gives a job:
    the group and its rules, such as rule_allocation-base_stage_run_train_run."""
    rules = "|".join(ALLOCATION_RULES)
    match = re.fullmatch(rf"rule_{ALLOCATION}-(.+?)(?:_(?:{rules}))+", comment)
    return match.group(1) if match else None


def read_queue(
    users: Iterable[int],
    *,
    name: str | None = None,
    patience_sec: float | None = None,
    timeout_sec: float = slurm.ASK_SEC,
) -> list[QueuedJob]:
    """The jobs of these users (uids), by one squeue. patience_sec, timeout_sec: as for slurm.ask.
    name: only jobs of this name, including those that ended less than MinJobAge ago. Raises
    SlurmSilent."""
    line = ["squeue", "--noheader", f"--user={','.join(map(str, sorted(users)))}"]
    line += [f"--name={name}", "--states=all", "--array"] if name else []
    try:
        text = slurm.ask(
            *line, f"--format={FORMAT}", patience_sec=patience_sec, timeout_sec=timeout_sec
        )
    except slurm.Refused as err:
        raise slurm.silent(str(err)) from None
    # The comment of another job may contain a line break: its lines have too few fields.
    return [parse_line(line) for line in text.splitlines() if line.count("|") >= 8]


def parse_line(line: str) -> QueuedJob:
    """A job from a line of squeue in FORMAT."""
    job_id, state, reason, nodes, batch, submitted, start, comment, folder = line.split("|", 8)
    run = run_of(comment)
    times = (_seconds(submitted), _seconds(start))
    return QueuedJob(job_id, state, reason, nodes, batch, *times, run, Path(folder), comment)


def _seconds(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None  # N/A


def of_run(queue: Iterable[QueuedJob], name: str, ids: set[str], project: Path) -> QueuedJob | None:
    """The job of a run in the queue; a running one rather than a pending one.

    ids: jobs that the files of the run name. project: directory from which Snakemake is called.
    """
    home = os.path.realpath(project)
    of_this_run = [
        job
        for job in queue
        if job.id in ids or (job.run == name and os.path.realpath(job.folder) == home)
    ]
    wanted = [job for job in of_this_run if job.is_living] + [
        job for job in of_this_run if job.is_waiting
    ]
    return wanted[0] if wanted else None


def refuse_queued(runs: Iterable[str], but: Collection[str] = ()) -> None:
    """UnfitError for jobs in the queue that the project in this folder submitted for these runs. but: ids
    of jobs that may be there."""
    queue = [job for job in read_queue([os.getuid()]) if job.id not in but]
    training = [(run, job) for run in runs if (job := of_run(queue, run, set(), Path.cwd()))]
    if training:
        raise UnfitError(
            "; ".join(f"job {job.id} ({job.state}) trains {run}" for run, job in training),
            cause="an earlier Snakemake was killed, or the same command was given twice",
            fix=f"wait for it, or end it: scancel {' '.join(job.id for _, job in training)}\n"
            "         (slurm.when_running: wait in machine.yaml waits and then continues)",
        )


def own_nodes() -> str:
    """A warning for a Snakemake that submits jobs from within one that holds whole nodes; "" elsewhere,
    or where Slurm does not answer."""
    try:
        job = slurm.own_job()
    except slurm.SlurmSilent:
        return ""
    if job is None or (len(job.nodes) < 2 and not job.exclusive):
        return ""
    return (
        f"warning: this command runs in job {job.id}, which holds {','.join(job.nodes)}. The jobs that it"
        " submits need other nodes: where there are none, they wait until this job ends. Give the command"
        " itself one core, run it on the login node, or use `forge submit`; a profile for an allocation"
        " (profiles/interactive) trains on its own nodes"
    )


# Slurm's reasons (man squeue, JOB REASON CODES) that last until somebody acts, as patterns, with what
# to do. {job} is the id of the job. The first pattern that matches the reason counts.
_AGAIN = "scancel {job}, then rerun the same command"
_LASTING = {
    "PartitionTimeLimit": "the partition allows less time: lower runtime in the profile to what"
    f" `scontrol show partition` says (MaxTime), {_AGAIN}",
    "PartitionNodeLimit": "the partition does not allow this number of nodes: set nodes in the"
    f" profile to what `scontrol show partition` says (MinNodes, MaxNodes), {_AGAIN}",
    r"(Assoc|QOS)Max(WallDuration|CPUMinutes)PerJob(Limit)?": "your account or QOS allows less time"
    f" for one job: lower runtime in the profile to what `sacctmgr show assoc` and `sacctmgr show"
    f" qos` say (MaxWall), {_AGAIN}",
    r"(Assoc|QOS)Max\w+Per(Job|Node)(Limit)?": "your account or QOS allows less for one job: lower"
    " nodes, cpus_per_task, mem_mb or gres in the profile to what `sacctmgr show assoc` and"
    f" `sacctmgr show qos` say (MaxTRES), {_AGAIN}",
    r"QOSMin\w+": "your QOS wants larger jobs: ask for more in the profile, as `sacctmgr show qos`"
    f" says (MinTRES), {_AGAIN}",
    "BadConstraints": "no nodes of the partition have what is asked for: correct constraint, gres,"
    f" mem_mb and nodes in the profile (`sinfo -o '%N %f %G %m'`), {_AGAIN}",
    "JobHeldUser": "the job is held: scontrol release {job}",
    "JobHeldAdmin": "an administrator holds the job: ask why; once you may release it: scontrol"
    " release {job}",
    "launch_failed_requeued_held": "a node could not start the job, so Slurm holds it: tell your"
    " administrators (the node's prolog may have failed), then scontrol release {job}",
    r"job_requeued_in_held_state": "the job is held: scontrol release {job}",
    r"DependencyNeverSatisfied|ReservationDeleted|InvalidAccount|InvalidQOS|AccountNotAllowed"
    r"|QOSNotAllowed": f"correct account, qos and slurm.options in the profile, {_AGAIN}",
}


# Reasons that pass, but after hours or days, and with which a person can do something.
_SLOW = {
    r"ReqNodeNotAvail.*maintenance.*|Reservation": "nodes that it needs are reserved, for maintenance or"
    " for others (`scontrol show reservation`): it starts after that, or before with a shorter runtime",
    r"ReqNodeNotAvail.*": "nodes that it needs are down, drained or reserved (`sinfo -R`): it starts when"
    " they are back",
}
# Reasons that a job may have because of the nodes that it excludes.
_OF_EXCLUDED = r"(BadConstraints|ReqNodeNotAvail).*"


def excluded_nodes(reason: str, bad_nodes: Path) -> list[exclude.BadNode]:
    """The nodes that the run excludes as unhealthy (bad_nodes.txt), where the reason may be that too few
    are left."""
    is_of_excluded = re.fullmatch(_OF_EXCLUDED, _word(reason), flags=re.IGNORECASE)
    return exclude.entries(bad_nodes) if is_of_excluded else []


def advice_on_excluded(job_id: str, names: str, bad_nodes: Path) -> str:
    """Advice about a job that may have too few nodes because of those in this file."""
    return (
        f"{bad_nodes} excludes {names}: remove lines of healthy nodes, {_AGAIN.format(job=job_id)}"
    )


def slow_advice(reason: str) -> str:
    """Meaning of a reason that passes by itself, but slowly; "" for others."""
    for pattern, advice in _SLOW.items():
        if re.fullmatch(pattern, _word(reason), flags=re.IGNORECASE):
            return advice
    return ""


def _word(reason: str) -> str:
    return reason.strip("() ").replace(" ", "_")


def lasting_advice(job_id: str, reason: str) -> str:
    """Advice about a reason that does not pass by itself; "" for one that does, such as Priority.

    reason: as squeue writes it (%r), with blanks or underscores.
    """
    for pattern, advice in _LASTING.items():
        if re.fullmatch(pattern, _word(reason), flags=re.IGNORECASE):
            return advice.format(job=job_id)
    return ""
