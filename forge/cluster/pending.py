"""Reasons for which a job is pending, and advice on those that do not pass by themselves."""

from __future__ import annotations

import re
from pathlib import Path

from forge.cluster import exclude

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
    "JobHeldAdmin": "an administrator holds the job: ask why; where it is yours again, scontrol"
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
    """What to do about a job that may have too few nodes because of those in this file."""
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
    """What to do about a reason that does not pass by itself; "" for one that does, such as Priority.

    reason: as squeue writes it (%r), with blanks or underscores.
    """
    for pattern, advice in _LASTING.items():
        if re.fullmatch(pattern, _word(reason), flags=re.IGNORECASE):
            return advice.format(job=job_id)
    return ""
