"""The twin of a site: a test cluster with the nodes, partitions, limits and accounts of a real one.

The file has Slurm's answers on that cluster, as `forge profile --save FILE` writes them. The site's are:
names, limits, accounts, QOS and preemption of partitions; CPUs, memory, GPUs and features of nodes; the
user's associations and all QOS (root has them in the twin, as its jobs are root's); and of slurm.conf
the keys in OF_CLUSTER and WORDS of twin_keys.py, with Slurm's default where the file has none. The test
cluster's own, as in SLURM_CONF of settings.py, are: names and number of nodes, the cluster's name,
daemons, plugins that need cgroups, and what makes it fast (AuthInfo=cred_expire, SchedulerParameters,
timeouts of daemons).
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from forge.core.errors import DataError
from forge.slurm.site import SiteAnswers

from .cluster import fields
from .machines import ClusterError
from .settings import PartitionSettings, Settings, slurm_conf
from .twin_accounts import commands, of_user, qos_names
from .twin_keys import (
    UNSET,
    LeftOut,
    checked,
    keys_of_cluster,
    keys_of_partition,
    names_in,
    own_keys,
)
from .twin_nodes import Group, groups_of, notes_on_nodes, numbers_of, twins_of

MAX_PARTITIONS = 200

Values = Mapping[str, str]


def twin_of(site: SiteAnswers) -> tuple[Settings, list[str]]:
    """Settings of the twin, and notes for people: what stands for what, what was scaled or left out.

    Raises DataError for a name that slurm.conf could take for something else, or a size out of bounds.
    """
    left_out = LeftOut()
    values, notes = _open_partitions(site)
    groups = groups_of(site, list(values))
    numbers = numbers_of(groups)
    twins = twins_of(numbers)
    named = {
        qos
        for partition in values.values()
        for key in ("QoS", "AllowQos", "DenyQos")
        for qos in names_in("QOS", partition.get(key, ""))
    }
    qos = qos_names(site, named, left_out)
    gpu_types = sorted({model for group in numbers for model, _ in group.kind.gpus if model})
    keys = keys_of_cluster(site.settings, left_out) | _tracked(numbers, gpu_types)
    partitions = tuple(
        PartitionSettings(
            name,
            keys_of_partition(name, partition, left_out, qos=qos, gpu_types=gpu_types),
            tuple(twin for twin, group in twins.items() if name in group.partitions),
        )
        for name, partition in values.items()
    )
    accounting = tuple(commands(site, qos, set(values), gpu_types, left_out))
    settings = Settings(
        nodes=len(twins),
        kinds=tuple(group.kind for group in twins.values()),
        partitions=partitions,
        qos=tuple(name for name in qos if name != "normal"),
        accounting=(*accounting, *(() if of_user(site) else Settings().accounting)),
        keys=keys,
    )
    return settings, [
        *notes_on_nodes(groups, twins),
        *notes,
        *_notes_on_partitions(settings),
        *_notes_on_accounts(site),
        *left_out.notes(),
        *own_keys(site.settings, slurm_conf(settings, Path("/"))),
    ]


def fit_for_here(settings: Settings) -> tuple[Settings, list[str]]:
    """The settings without keys that the Slurm of this machine does not know, and a note on each of
    these. ClusterError when it refuses slurm.conf for another reason."""
    notes: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        conf = Path(folder) / "slurm.conf"
        while True:
            conf.write_text(slurm_conf(settings, Path(folder)))
            # It reads slurm.conf, names keys that it does not know, and asks no daemon.
            asked = subprocess.run(
                ["sinfo", "--version"],
                env={**os.environ, "SLURM_CONF": str(conf)},
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
            )
            if not asked.returncode:
                return settings, notes
            unknown = set(re.findall(r"unrecognized key: (\w+)", asked.stderr))
            fitting = settings.without(unknown)
            if fitting == settings:
                raise ClusterError(f"Slurm refuses the twin's slurm.conf: {asked.stderr.strip()}")
            settings = fitting
            notes += [
                f"left out: {key}, which the Slurm here does not know" for key in sorted(unknown)
            ]


# ---------------------------------------------------------------------- partitions


def _open_partitions(site: SiteAnswers) -> tuple[dict[str, Values], list[str]]:
    """Fields of the partitions that the user may use, by name, and a note on the others."""
    visible = set(site.answer("visible").lines)
    shown = [fields(line) for line in site.answer("partitions").lines]
    found = {checked("partition", one.get("PartitionName", "")): one for one in shown}
    if not 1 <= len(found) <= MAX_PARTITIONS:
        raise DataError(
            f"the file has {len(found)} partitions; a twin has 1 to {MAX_PARTITIONS}",
            fix=SiteAnswers.FIX,
        )
    closed = {
        name: key
        for name, one in found.items()
        for key, is_closed in {
            "AllowGroups": one.get("AllowGroups", "ALL") not in UNSET and name not in visible,
            "RootOnly": one.get("RootOnly") == "YES",
            "ReqResv": one.get("ReqResv") == "YES",
        }.items()
        if is_closed
    }
    notes = [
        f"left out: partition {name}, closed to the user ({key})" for name, key in closed.items()
    ]
    return {name: one for name, one in found.items() if name not in closed}, notes


def _notes_on_partitions(settings: Settings) -> Iterator[str]:
    for partition in settings.partitions:
        nodes, least = len(partition.nodes or ()), int(partition.keys.get("MinNodes", 0))
        if not nodes:
            yield f"partition {partition.name} has no nodes here"
        elif nodes < least:
            yield (
                f"partition {partition.name} has {nodes} nodes here, and a job must ask for"
                f" {least} (MinNodes): none can start"
            )


# ---------------------------------------------------------------------- accounting


def _tracked(numbers: Mapping[Group, int], gpu_types: Sequence[str]) -> dict[str, str | None]:
    """Settings of the resources that Slurm counts for limits: GPUs, and each type of them."""
    if not any(group.kind.gpus for group in numbers):
        return {"GresTypes": None, "AccountingStorageTRES": None}
    return {"AccountingStorageTRES": ",".join(["gres/gpu", *(f"gres/gpu:{t}" for t in gpu_types)])}


def _notes_on_accounts(site: SiteAnswers) -> Iterator[str]:
    if of_user(site):
        yield "jobs are root's, with the accounts that the user has at the site"
    else:
        yield "the file has no account of the user: here it is root, or lab"
