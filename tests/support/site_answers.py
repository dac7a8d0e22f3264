"""Slurm's answers of a made-up site, as `forge profile --save FILE` writes them."""

from __future__ import annotations

from collections.abc import Sequence

from forge.slurm.partitions import NODES, PARTITIONS
from forge.slurm.site import Answer, SiteAnswers

# What Slurm prints of a partition whose configuration is empty.
_PARTITION = {
    **{"AllowGroups": "ALL", "AllowAccounts": "ALL", "AllowQos": "ALL", "AllocNodes": "ALL"},
    **{"Default": "NO", "QoS": "N/A", "DefaultTime": "NONE", "GraceTime": "0", "Hidden": "NO"},
    **{"MaxNodes": "UNLIMITED", "MaxTime": "UNLIMITED", "MinNodes": "0", "RootOnly": "NO"},
    **{"MaxCPUsPerNode": "UNLIMITED", "MaxCPUsPerSocket": "UNLIMITED", "PriorityTier": "1"},
    **{"ReqResv": "NO", "OverSubscribe": "NO", "OverTimeLimit": "NONE", "PreemptMode": "OFF"},
    **{"State": "UP", "TotalNodes": "1", "JobDefaults": "(null)", "MaxMemPerNode": "UNLIMITED"},
    **{"DefMemPerNode": "UNLIMITED", "TRES": "cpu=1,mem=1M,node=1"},
}
_CONFIG = {
    **{"AccountingStorageEnforce": "associations,limits,qos,safe", "ClusterName": "far"},
    **{"EnforcePartLimits": "NO", "JobRequeue": "1", "KillWait": "30 sec"},
    **{"PreemptMode": "OFF", "PreemptType": "preempt/none", "SelectType": "select/cons_tres"},
    **{"SelectTypeParameters": "CR_CORE_MEMORY", "TaskPlugin": "task/affinity"},
}
_ASSOCIATION = "cluster,account,partition,qos,defaultqos,grptres,maxtres,maxwall"
_QOS = "name,priority,flags,gracetime,preempt,preemptmode,grptres,maxtresperuser,maxwall"


def partition(name: str, **keys: str) -> str:
    """A line of `scontrol show partition --oneliner`."""
    return " ".join(f"{k}={v}" for k, v in {"PartitionName": name, **_PARTITION, **keys}.items())


def nodes(
    where: str,
    names: Sequence[str],
    what: str = "96|1500000",
    gres: str = "(null)",
    of: str = "(null)",
) -> list[str]:
    """Lines of sinfo. where: partitions, with commas. what: CPUs and MB. of: features."""
    return [f"{one}|{name}|{what}|idle|{of}|{gres}|0" for name in names for one in where.split(",")]


def site(
    partitions: Sequence[str],
    sinfo: Sequence[str],
    *,
    associations: Sequence[str] = ("far|lab||normal|||",),
    qos: Sequence[str] = ("normal|0||00:00:00||cluster|||",),
    examples: Sequence[str] = (),
    **config: str,
) -> SiteAnswers:
    """A site. associations and qos: rows, in the order of the columns above."""
    settings = [f"{key:<24}= {value}" for key, value in {**_CONFIG, **config}.items()]
    shown = [line.split()[0].partition("=")[2] for line in partitions if "=admins" not in line]
    show = ("sacctmgr", "--noheader", "--parsable2", "show")
    return SiteAnswers(
        source="cluster far",
        synthetic=True,
        slurm="24.11.5",
        answers={
            "version": _answer(("sinfo", "--version"), ["slurm 24.11.5"]),
            "config": _answer(("scontrol", "show", "config"), settings),
            "visible": _answer(("sinfo", "--noheader", "--format=%R"), shown),
            "partitions": _answer(PARTITIONS, partitions),
            "nodes": _answer(NODES, sinfo),
            "examples": _answer(("scontrol", "show", "node"), examples),
            "user": _answer((*show, "user", "anna", "format=user,defaultaccount"), ["anna|lab"]),
            "associations": _answer((*show, "assoc", f"format={_ASSOCIATION}"), associations),
            "qos": _answer((*show, "qos", f"format={_QOS}"), qos),
        },
    )


def _answer(command: Sequence[str], lines: Sequence[str]) -> Answer:
    return Answer(command=list(command), output="".join(f"{line}\n" for line in lines))
