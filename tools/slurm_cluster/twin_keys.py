"""Keys of a site's slurm.conf that its twin takes, and their forms.

A value is copied only where it matches its pattern whole: it stands in the file of another cluster, and
slurm.conf has one key after the other in a line.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping

from forge.core.errors import DataError
from forge.core.terminal import one_line
from forge.slurm.site import SiteAnswers

NAME = r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}"
FEATURE = r"[A-Za-z0-9][A-Za-z0-9_.:/+-]{0,63}"
_RESERVED = {
    "all",
    "default",
}  # in slurm.conf they mean every partition, and values for those below

_COUNT = r"[0-9]{1,9}"
_TIME = r"([0-9]{1,4}-)?[0-9]{1,3}:[0-9][0-9]:[0-9][0-9]"
_WEIGHT = re.compile(
    rf"(?:cpu|mem|node|gres/gpu(?::({NAME}))?)=[0-9]{{1,9}}(?:\.[0-9]{{1,9}})?[KMGTP]?",
    re.IGNORECASE,
)
_OF_JOBS = r"(DefCpuPerGPU|DefMemPerGPU)=([0-9]{1,9})"
# What Slurm prints where nothing is set.
UNSET = ("", "(null)", "N/A", "NONE", "none", "UNLIMITED", "ALL", "NO")

# Of a partition, with the pattern of their values, also those that only newer versions of Slurm know.
# Lists of names are in LISTS.
OF_PARTITION = {
    "Default": "YES|NO",
    "DefaultTime": _TIME,
    "DefMemPerCPU": _COUNT,
    "DefMemPerNode": _COUNT,
    "ExclusiveTopo": "YES|NO",
    "ExclusiveUser": "YES|NO",
    "GraceTime": _COUNT,
    "Hidden": "YES|NO",
    "LLN": "YES|NO",
    "MaxCPUsPerNode": _COUNT,
    "MaxCPUsPerSocket": _COUNT,
    "MaxMemPerCPU": _COUNT,
    "MaxMemPerNode": _COUNT,
    "MaxNodes": _COUNT,
    "MaxTime": _TIME,
    "MinNodes": _COUNT,
    "OverSubscribe": r"NO|EXCLUSIVE|(YES|FORCE)(:[0-9]{1,5})?",
    "OverTimeLimit": _COUNT,
    "PreemptMode": "OFF|CANCEL|REQUEUE|SUSPEND",
    "PriorityJobFactor": _COUNT,
    "PriorityTier": _COUNT,
    "State": "UP|DOWN|DRAIN|INACTIVE",
}
LISTS = {
    "AllowAccounts": "account",
    "DenyAccounts": "account",
    "AllowQos": "QOS",
    "DenyQos": "QOS",
    "QoS": "QOS",
}
# Counted by Slurm, or decided elsewhere in the twin.
_NOT_SET = {
    *("PartitionName", "Nodes", "TotalCPUs", "TotalNodes", "TRES", "AllowGroups"),
    *("RootOnly", "ReqResv"),
    "DisableRootJobs",  # jobs of the twin are root's
}

# Of `scontrol show config`. Units behind numbers are dropped before.
OF_CLUSTER = {
    "DefMemPerCPU": _COUNT,
    "DefMemPerNode": _COUNT,
    "EnforcePartLimits": "NO|YES|ANY|ALL",
    "JobRequeue": "0|1",
    "KillOnBadExit": "0|1",
    "KillWait": _COUNT,
    "MaxMemPerCPU": _COUNT,
    "MaxMemPerNode": _COUNT,
    "MaxTasksPerNode": _COUNT,
    "OverTimeLimit": _COUNT,
    "PreemptExemptTime": _TIME,
    "PreemptType": "preempt/(none|partition_prio|qos)",
    "SelectType": "select/(linear|cons_res|cons_tres)",
}
# Of the same, with the words that Slurm 22.05 knows, or that are looked for here.
WORDS = {
    "AccountingStorageEnforce": {"associations", "limits", "qos", "safe"},
    "PreemptMode": {"OFF", "CANCEL", "REQUEUE", "SUSPEND", "GANG", "WITHIN"},
    "PreemptParameters": {
        *("reclaim_licenses", "send_user_signal", "strict_order", "youngest_first"),
    },
    "SelectTypeParameters": {
        *("CR_CPU", "CR_CPU_MEMORY", "CR_CORE", "CR_CORE_MEMORY", "CR_SOCKET", "CR_SOCKET_MEMORY"),
        *("CR_MEMORY", "CR_ONE_TASK_PER_CORE", "CR_CORE_DEFAULT_DIST_BLOCK", "CR_LLN"),
        "CR_PACK_NODES",
    },
    "SlurmctldParameters": {"preempt_send_user_signal"},
}
# Where a site says nothing, it has Slurm's default, not what tests need. None: no such line.
_DEFAULTS: Mapping[str, str | None] = {
    **{"JobRequeue": "1", "KillWait": "30", "PreemptMode": "OFF", "PreemptType": "preempt/none"},
    "SlurmctldParameters": None,
}
# Differ always, and change nothing for a job.
_UNMENTIONED = {
    *("AccountingStorageType", "ClusterName", "GresTypes", "MaxNodeCount", "PrivateData"),
    *("JobDefaults", "PriorityType", "SLURM_VERSION"),
}


class LeftOut(defaultdict[str, list[str]]):
    """Parts of the site that the twin does not have, each with its places."""

    def __init__(self) -> None:
        super().__init__(list)

    def add(self, what: str, where: str) -> None:
        self[one_line(what)[:120]].append(where)

    def notes(self) -> list[str]:
        return [
            f"left out: {what} ({', '.join(dict.fromkeys(where))})"
            for what, where in sorted(self.items())
        ]


def checked(kind: str, name: str, pattern: str = NAME) -> str:
    """The name of a partition, account, QOS, GPU type or feature. DataError where slurm.conf or sacctmgr
    could take it for something else."""
    if re.fullmatch(pattern, name) and name.lower() not in _RESERVED:
        return name
    raise DataError(
        f"{kind} {name[:80]!r} is no name that Slurm's files can hold",
        cause="the file was edited by hand, or damaged",
        fix=SiteAnswers.FIX,
    )


def names_in(kind: str, text: str) -> list[str]:
    """The names of a list of Slurm, none for a word such as ALL. Raises DataError as `checked`."""
    return [] if text in UNSET else [checked(kind, name) for name in text.split(",") if name]


def keys_of_partition(
    name: str,
    values: Mapping[str, str],
    left_out: LeftOut,
    *,
    qos: Collection[str],
    gpu_types: Collection[str],
) -> dict[str, str]:
    """Keys of a partition's line, from those of `scontrol show partition`. Raises DataError for a name
    that is none. qos, gpu_types: that the twin has."""
    keys: dict[str, str] = {}
    where = f"partition {name}"
    for key, value in values.items():
        if key in _NOT_SET or value in UNSET:
            continue
        if key in LISTS:
            names = names_in(LISTS[key], value)
            if LISTS[key] == "QOS":
                names = [each for each in names if each in qos]
            keys |= {key: ",".join(names)} if names else {}
        elif re.fullmatch(OF_PARTITION.get(key, ""), value):
            keys[key] = value
        elif key == "JobDefaults":  # printed under this name, set under their own
            keys |= dict(re.findall(_OF_JOBS, value))
        elif key == "TRESBillingWeights":
            keys |= _weights(value, gpu_types, left_out, where)
        elif (key, value) == ("Exclusive", "NODE"):  # of Slurm 25.05
            keys["OverSubscribe"] = "EXCLUSIVE"
        elif key in OF_PARTITION or value != "0":
            left_out.add(f"{key}={value}", where)
    return keys


def _weights(
    value: str, gpu_types: Collection[str], left_out: LeftOut, where: str
) -> dict[str, str]:
    kept = []
    for weight in value.split(","):
        match = _WEIGHT.fullmatch(weight)
        if match and (not match[1] or match[1] in gpu_types):
            kept.append(weight)
        else:
            left_out.add(f"TRESBillingWeights={weight}", where)
    return {"TRESBillingWeights": f'"{",".join(kept)}"'} if kept else {}


def keys_of_cluster(settings: Mapping[str, str], left_out: LeftOut) -> dict[str, str | None]:
    """Top-level keys of slurm.conf that are the site's, from `scontrol show config`."""
    keys = dict(_DEFAULTS)
    for key, shown in settings.items():
        value = re.sub(r"(?<=[0-9]) (sec|min)$", "", shown)
        if re.fullmatch(OF_CLUSTER.get(key, ""), value):
            keys[key] = value
        elif value in UNSET:
            continue
        elif key == "JobDefaults":
            keys |= dict(re.findall(_OF_JOBS, value))
        elif key in WORDS:
            keys[key] = _known_words(key, value, left_out) or _DEFAULTS.get(key)
        elif key in OF_CLUSTER:
            left_out.add(f"{key}={value}", "slurm.conf")
    if keys.get("SelectType") == "select/cons_res":  # no longer in Slurm 24.05, and without GPUs
        keys["SelectType"] = "select/cons_tres"
    if "send_user_signal" in (keys.get("PreemptParameters") or ""):  # 22.05 has it elsewhere
        keys["SlurmctldParameters"] = "preempt_send_user_signal"
    return keys


def _known_words(key: str, value: str, left_out: LeftOut) -> str:
    words = value.split(",")
    for word in words:
        if word not in WORDS[key] and key != "SlurmctldParameters":
            left_out.add(f"{key}={word}", "slurm.conf")
    return ",".join(word for word in words if word in WORDS[key])


def own_keys(settings: Mapping[str, str], conf: str) -> list[str]:
    """A note on each setting that is the test cluster's and differs from the site's. conf: slurm.conf."""
    own = dict(line.split("=", 1) for line in conf.splitlines() if re.match(r"\w+=", line))
    differing = [
        f"{key} (the site's: {one_line(value)[:80]})"
        for key, value in settings.items()
        if key not in OF_CLUSTER.keys() | WORDS.keys() | _UNMENTIONED
        and value not in UNSET
        and not value.endswith("/none")
        and own.get(key, "").lower() != value.lower()
    ]
    return [f"the test cluster's own, not the site's: {', '.join(differing)}"] if differing else []
