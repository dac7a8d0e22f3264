"""Accounts and QOS of a site as commands of sacctmgr for its twin."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from forge.core.errors import DataError
from forge.slurm.partitions import minutes
from forge.slurm.site import SiteAnswers

from .settings import CLUSTER
from .twin_keys import NAME, LeftOut, checked, names_in

Row = Mapping[str, str]
Words = tuple[str, ...]

MAX_QOS = 200
# Columns of `sacctmgr show assoc` and `show qos`, as `sacctmgr set` calls them.
_TRES_OF_ASSOCIATION = {
    "grptres": "GrpTRES",
    "maxtres": "MaxTRESPerJob",
    "maxtrespernode": "MaxTRESPerNode",
}
_TRES_OF_QOS = {
    **_TRES_OF_ASSOCIATION,
    "maxtresperuser": "MaxTRESPerUser",
    "maxtresperaccount": "MaxTRESPerAccount",
    "mintres": "MinTRESPerJob",
}
_FLAGS = {  # that Slurm 22.05 knows
    *("DenyOnLimit", "EnforceUsageThreshold", "NoDecay", "NoReserve", "OverPartQOS"),
    *("PartitionMaxNodes", "PartitionMinNodes", "PartitionTimeLimit", "UsageFactorSafe"),
}
_TRES = re.compile(
    rf"(cpu|mem|node|billing|gres/gpu(?::{NAME})?)=([0-9]{{1,15}}(?:\.[0-9]+)?[KMGTP]?)"
)
_WALL = r"([0-9]{1,4}-)?[0-9]{1,3}:[0-9][0-9]:[0-9][0-9]"


def qos_names(site: SiteAnswers, of_partitions: Collection[str], left_out: LeftOut) -> list[str]:
    """The QOS that matter to the user: of partitions, of the user's associations, and those that preempt
    one of these or are preempted by one. DataError for a name that is none, or too many."""
    preempted = {
        checked("QOS", row["name"]): set(names_in("QOS", row.get("preempt", "")))
        for row in site.answer("qos").rows
        if row.get("name")
    }
    own = {
        *of_partitions,
        *(q for row in of_user(site) for q in names_in("QOS", row.get("qos", ""))),
    }
    preempting = {name for name, others in preempted.items() if others & own}
    kept = own | preempting | {other for name in own for other in preempted.get(name, ())}
    if others := sorted(preempted.keys() - kept):
        left_out.add(
            f"{len(others)} QOS such as {others[0]}", "neither the user's nor a partition's"
        )
    if len(kept) > MAX_QOS:
        raise DataError(f"the file has {len(kept)} QOS; a twin has at most {MAX_QOS}")
    return sorted(kept)


def of_user(site: SiteAnswers) -> list[dict[str, str]]:
    """The user's associations with this cluster, the default account's first; one for each account and
    partition."""
    cluster = site.settings.get("ClusterName", "").lower()
    default = next((row.get("defaultaccount") for row in site.answer("user").rows), None)
    rows = {
        (row["account"].lower(), row.get("partition", "")): row
        for row in site.answer("associations").rows
        if row.get("account") and cluster in ("", row.get("cluster", "").lower())
    }
    return sorted(rows.values(), key=lambda row: row["account"] != default)


def commands(
    site: SiteAnswers,
    qos: Collection[str],
    partitions: Collection[str],
    tracked: Collection[str],
    left_out: LeftOut,
) -> Iterator[Words]:
    """Words of each command, for the new database of a cluster whose QOS exist.

    partitions: that the twin has. tracked: types of GPU that limits may name. Raises DataError for a name
    of an account or QOS that is none.
    """
    for row in site.answer("qos").rows:
        if row.get("name") in qos:
            limits = [*_of_qos(row, qos, left_out), *_tres(row, _TRES_OF_QOS, tracked, left_out)]
            if limits:
                yield ("modify", "qos", row["name"], "set", *limits)
    rows = []
    for row in of_user(site):
        if (partition := row.get("partition", "")) in ("", *partitions):
            rows.append(row)
        else:
            left_out.add(f"account {row['account']}", f"only in partition {partition}")
    accounts = list(dict.fromkeys(checked("account", row["account"]) for row in rows))
    # A new cluster has an account root, with the user root in it; most sites' users have not.
    if new := [account for account in accounts if account != "root"]:
        where = (f"Cluster={CLUSTER}", "Description=twin", "Organization=twin")
        yield ("add", "account", ",".join(new), *where)
    for row in rows:
        limits = [*_of_user(row, qos), *_tres(row, _TRES_OF_ASSOCIATION, tracked, left_out)]
        whose = ("user", "root", f"Account={row['account']}")
        if row["account"] != "root" or row.get("partition"):
            yield ("add", *whose, *limits)
        elif limits:
            yield ("modify", *whose, "set", *limits)
    if new:
        yield ("modify", "user", "root", "set", f"DefaultAccount={accounts[0]}")
        if "root" not in accounts:
            yield ("delete", "user", "root", "Account=root")


def _of_user(row: Row, qos: Collection[str]) -> Iterator[str]:
    if partition := row.get("partition"):
        yield f"Partition={partition}"
    names = [name for name in names_in("QOS", row.get("qos", "")) if name in qos]
    if names:
        yield f"QosLevel={','.join(names)}"
    if (default := row.get("defaultqos")) in names:
        yield f"DefaultQOS={default}"
    if re.fullmatch(_WALL, row.get("maxwall", "")):
        yield f"MaxWall={row['maxwall']}"
    if re.fullmatch(r"[0-9]{1,9}", row.get("maxjobs", "")):
        yield f"MaxJobs={row['maxjobs']}"


def _of_qos(row: Row, qos: Collection[str], left_out: LeftOut) -> Iterator[str]:
    where = f"QOS {row['name']}"
    if re.fullmatch(r"[1-9][0-9]{0,8}", row.get("priority", "")):
        yield f"Priority={row['priority']}"
    if re.fullmatch(_WALL, grace := row.get("gracetime", "")) and minutes(grace):
        yield f"GraceTime={round(60 * minutes(grace))}"  # printed as a time, read in seconds
    if re.fullmatch(_WALL, row.get("maxwall", "")):
        yield f"MaxWall={row['maxwall']}"
    if row.get("preemptmode", "").lower() in ("cancel", "requeue", "suspend"):
        yield f"PreemptMode={row['preemptmode']}"
    if preempted := [name for name in names_in("QOS", row.get("preempt", "")) if name in qos]:
        yield f"Preempt={','.join(preempted)}"
    flags = [flag for flag in row.get("flags", "").split(",") if flag]
    for flag in flags:
        if flag not in _FLAGS:
            left_out.add(f"Flags={flag}", where)
    if kept := [flag for flag in flags if flag in _FLAGS]:
        yield f"Flags={','.join(kept)}"


def _tres(
    row: Row, columns: Mapping[str, str], tracked: Collection[str], left_out: LeftOut
) -> Iterator[str]:
    """Limits of resources that the twin counts, such as MaxTRESPerUser=gres/gpu=16."""
    whose = f"QOS {row['name']}" if row.get("name") else f"account {row.get('account', '')}"
    for column, key in columns.items():
        kept = []
        for limit in filter(None, row.get(column, "").split(",")):
            match = _TRES.fullmatch(limit)
            gpu_type = match[1].partition(":")[2] if match else ""
            if match and (not gpu_type or gpu_type in tracked):
                kept.append(limit)
            else:
                left_out.add(f"{key}={limit}", whose)
        if kept:
            yield f"{key}={','.join(kept)}"
