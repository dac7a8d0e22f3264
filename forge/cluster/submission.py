"""Checks before submission: could Slurm ever start these jobs?

A job that can never start stays PENDING without a message, and `sbatch --test-only` accepts it
(22.05: time limit, a partition that is down, the account) or rejects a job only because its nodes
are drained. So the limits are read from the partitions, and sbatch is asked for the rest.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from forge.cluster import slurm
from forge.cluster.job_requests import Request
from forge.cluster.partitions import Node, Partition, read_partitions
from forge.core.errors import ConfigError

TEST_SEC = 60.0  # sbatch --test-only plans the whole queue on a busy controller

# What --test-only says of nodes that are drained, down or reserved, and of nodes that do not exist.
_NO_NODES = "Requested node configuration is not available"
# What it says of what passes by itself (slurm_errno.c of 22.05).
_PASSING = ("Requested nodes are busy", "Required node not available", "not available now")


def check(requests: Sequence[Request], say: Callable[[str], None]) -> None:
    """ConfigError, with the number to set, for what Slurm could never start. What it could start
    later (nodes drained, down or reserved; a partition that is down) is only said."""
    accounts = {request.account: request.place for request in reversed(requests)}
    for account, place in accounts.items():
        _check_account(account, place)
    partitions = _known_partitions(say)
    told = [
        trouble
        for request in requests
        for trouble in troubles(request, _as_its_qos_has_them(partitions, request.qos))
    ]
    if told:
        raise ConfigError(
            "\n".join(dict.fromkeys(what for what, _ in told)),
            cause="Slurm would refuse it, or accept it and never start it",
            fix="\n         ".join(dict.fromkeys(fix for _, fix in told)),
        )
    for request in requests:
        for partition in asked_partitions(request, partitions):
            if partition.state == "DOWN":
                say(
                    f"partition {partition.name} is DOWN: {request.name} waits in the queue until"
                    " the administrators set it UP"
                )
        _ask_sbatch(request, partitions, say)


def _check_account(accounts: str, place: str) -> None:
    from snakemake_executor_plugin_slurm.accounts import validate_account
    from snakemake_interface_common.exceptions import WorkflowError

    for account in filter(None, re.split(r"[,\s]+", accounts)):
        try:
            validate_account(account, logging.getLogger(__name__))
        except (WorkflowError, OSError) as err:
            raise ConfigError(
                f"slurm_account {account} ({place}): {err}",
                fix="edit this line in config.yaml of the profile",
            ) from None


def _known_partitions(say: Callable[[str], None]) -> dict[str, Partition]:
    try:
        return read_partitions()
    except (slurm.SlurmSilent, slurm.Refused) as err:
        say(f"limits of the partitions are not checked: {err}")
        return {}


def _as_its_qos_has_them(known: dict[str, Partition], qos: str) -> dict[str, Partition]:
    """The partitions without the limits that this QOS lifts (man sacctmgr, SPECIFICATIONS FOR QOS)."""
    if not qos or not known:
        return known
    line = ["sacctmgr", "--noheader", "--parsable2", "show", "qos", qos, "format=flags"]
    flags = slurm.run(line, timeout_sec=slurm.ASK_SEC)[0].strip().split(",")
    lifted: dict[str, Any] = {}
    if "PartitionTimeLimit" in flags:
        lifted["max_minutes"] = math.inf
    if "PartitionMaxNodes" in flags:
        lifted["max_nodes"] = math.inf
    if "PartitionMinNodes" in flags:
        lifted["min_nodes"] = 0
    return {name: replace(partition, **lifted) for name, partition in known.items()}


def asked_partitions(request: Request, known: Mapping[str, Partition]) -> list[Partition]:
    """The known partitions of a request; [] where Slurm does not show them."""
    names = request.partition.split(",") if request.partition else []
    names = names or [name for name, partition in known.items() if partition.is_default]
    return [known[name] for name in names if name in known] if set(names) <= set(known) else []


def troubles(request: Request, known: Mapping[str, Partition]) -> list[tuple[str, str]]:
    """Why Slurm could never start this, each with what to set; [] when one partition could."""
    told = [_troubles_in(partition, request) for partition in asked_partitions(request, known)]
    return [] if not all(told) else [trouble for each in told for trouble in each]


def _troubles_in(partition: Partition, request: Request) -> list[tuple[str, str]]:
    place, asks = request.place, f"{request.name} asks partition {partition.name} for"
    found = []
    if request.account and not any(map(partition.accepts, request.account.split(","))):
        allowed = ", ".join(sorted(partition.accounts)) or "not this one"
        found.append(
            (
                f"{request.name}: partition {partition.name} does not admit account"
                f" {request.account} (it admits: {allowed})",
                f"set another slurm_partition or slurm_account ({place})",
            )
        )
    if partition.state in ("DRAIN", "INACTIVE"):
        found.append(
            (
                f"{request.name}: partition {partition.name} is {partition.state} and takes no jobs",
                f"set another slurm_partition ({place}), or ask the administrators",
            )
        )
    if request.minutes > partition.max_minutes:
        found.append((_time_trouble(asks, request, partition), _time_fix(request, partition)))
    return found + _node_troubles(asks, request, partition)


def _time_trouble(asks: str, request: Request, partition: Partition) -> str:
    sum_of = f" ({request.other_minutes} of them for stage and preflight)"
    return (
        f"{asks} {request.minutes} minutes{sum_of if request.is_allocation else ''}, its limit"
        f" (MaxTime) is {partition.max_minutes:g}"
    )


def _time_fix(request: Request, partition: Partition) -> str:
    room = int(partition.max_minutes) - request.other_minutes
    if room < 1:
        return f"set a slurm_partition with a longer MaxTime ({request.place})"
    return f"set runtime: {room} or less ({request.place})"


def _node_troubles(asks: str, request: Request, partition: Partition) -> list[tuple[str, str]]:
    most = (
        min(partition.max_nodes, len(partition.nodes)) if partition.nodes else partition.max_nodes
    )
    if request.nodes > most:
        limit = "MaxNodes" if partition.max_nodes == most else "TotalNodes"
        what = f"{asks} {request.nodes} nodes, it gives {most:g} ({limit})"
        return [(what, f"set nodes: {most:g} or less, spare_nodes included ({request.place})")]
    if request.nodes < partition.min_nodes:
        what = (
            f"{asks} {request.nodes} nodes, it gives no less than {partition.min_nodes} (MinNodes)"
        )
        return [(what, f"set another slurm_partition ({request.place})")]
    if not partition.nodes:
        return []
    return _size_troubles(asks, request, partition)


def _size_troubles(asks: str, request: Request, partition: Partition) -> list[tuple[str, str]]:
    """What the nodes are too small for, or how many of them have all of it."""
    usable = [node for node in partition.nodes if node.name not in request.excluded]
    if len(usable) < request.nodes:
        what = (
            f"{asks} {request.nodes} nodes, and {len(usable)} of its {len(partition.nodes)} are left:"
            f" excluded are {', '.join(sorted(request.excluded))}"
        )
        return [(what, "look into results/RUN/bad_nodes.txt, slurm.exclude and slurm.options")]
    model, gpus = request.gpus
    sizes = {
        ("cores a node", _cores_key(request), request.cpus): [n.cpus for n in usable],
        ("MB a node", "mem_mb", request.mem_mb): [n.memory_mb for n in usable],
        (f"{model} GPUs a node".strip(), "gres", gpus): [n.num_gpus(model) for n in usable],
    }
    found = []
    for (unit, key, wanted), offered in sizes.items():
        most = sorted(offered, reverse=True)[request.nodes - 1]
        if wanted > most:
            what = f"{asks} {wanted} {unit}, {request.nodes} of its nodes have {most}"
            found.append((what, f"set {key} for {most} {unit} or less ({request.place})"))
    fitting = fitting_nodes(request, partition)
    if not found and len(fitting) < request.nodes:
        what = (
            f"{asks} {request.nodes} nodes with {request.cpus} cores, {request.mem_mb} MB"
            f"{f', {gpus} GPUs' if gpus else ''}"
            f"{f', feature {request.constraint}' if request.features else ''} each;"
            f" {len(fitting)} of its {len(partition.nodes)} have all of this"
        )
        found.append((what, f"lower them ({request.place}); `sinfo -N -o '%N %c %m %G %f'` shows"))
    return found


def _cores_key(request: Request) -> str:
    if request.is_allocation:
        return "tasks_per_node x cpus_per_task"
    return f"set-threads of {request.rules[0]}"


def fitting_nodes(request: Request, partition: Partition) -> list[Node]:
    """The nodes of the partition that are large enough, in whatever state they are."""
    model, gpus = request.gpus
    return [
        node
        for node in partition.nodes
        if node.name not in request.excluded
        and node.cpus >= request.cpus
        and node.memory_mb >= request.mem_mb
        and node.num_gpus(model) >= gpus
        and request.features <= node.features
    ]


# --- what nodes see --------------------------------------------------------------------------------


def check_folders(folders: Iterable[Path], say: Callable[[str], None]) -> None:
    """Say which of these folders nodes will hardly see. No error: this may be a node itself."""
    for folder in dict.fromkeys(folder.resolve() for folder in folders):
        if place := _own_place(folder):
            say(
                f"{folder} is on {place} of this machine: other machines do not see it, and a job"
                " there ends without a log. Move it to shared storage"
            )


def _own_place(folder: Path) -> str:
    """What makes a folder this machine's alone, "" for no such sign."""
    if folder.is_relative_to("/tmp"):
        return "the /tmp"
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    device = existing.stat().st_dev
    kind = _file_systems().get(f"{os.major(device)}:{os.minor(device)}", "")
    return f"a {kind}" if kind in ("tmpfs", "ramfs") else ""


def _file_systems() -> dict[str, str]:
    """Type of each mounted file system by its device (man 5 proc, mountinfo)."""
    lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    return {line.split()[2]: line.partition(" - ")[2].split()[0] for line in lines}


# --- what sbatch says ------------------------------------------------------------------------------


def _ask_sbatch(
    request: Request, known: Mapping[str, Partition], say: Callable[[str], None]
) -> None:
    """ConfigError for what sbatch refuses for good. Only the executor sees what the real sbatch of a
    group says, and a job that can never start waits for ever."""
    line = ["sbatch", "--test-only", *request.options, "--wrap=true"]
    _, trouble = slurm.run(line, timeout_sec=TEST_SEC)
    if not trouble or slurm.is_silence(trouble):
        return
    if waits := _passes_by_itself(trouble, request, known):
        say(f"{request.name} waits in the queue: {waits}")
    elif "allocation failure" in trouble or trouble.startswith("sbatch: "):
        partitions = f"partitions are: {', '.join(known)}; " if known else ""
        raise ConfigError(
            f"Slurm would not start {request.name}: sbatch {shlex.join(request.options)}\n  {trouble}",
            fix=f"edit {request.place} in config.yaml of the profile, or slurm.options in"
            f" machine.yaml; {partitions}`sinfo` and `sacctmgr show assoc` tell what there is",
        )


def _passes_by_itself(trouble: str, request: Request, known: Mapping[str, Partition]) -> str:
    """What the job would wait for, in words; "" for what never passes.

    Of nodes that are drained, down or reserved --test-only says what it says of nodes that do not
    exist. There are such nodes (else `troubles` had told): are enough of them up?
    """
    if any(words in trouble for words in _PASSING):
        return trouble
    partitions = asked_partitions(request, known)
    if _NO_NODES not in trouble or not partitions:
        return ""
    fitting = [node for p in partitions for node in fitting_nodes(request, p)]
    away = {node.name: node.state for node in fitting if not node.is_available}
    away |= dict.fromkeys(_reserved() & {node.name for node in fitting} - set(away), "reserved")
    if not away:
        return ""
    names = ", ".join(f"{name} {state}" for name, state in sorted(away.items())[:8])
    more = f" and {len(away) - 8} more" if len(away) > 8 else ""
    return f"{len(away)} of {len({n.name for n in fitting})} nodes that fit are {names}{more}"


def _reserved() -> set[str]:
    """Nodes of all reservations, those of later too: --test-only plans around none of them."""
    try:
        text = slurm.ask("scontrol", "show", "reservation", "--oneliner", patience_sec=0)
    except (slurm.SlurmSilent, slurm.Refused):
        return set()
    return {name for nodes in re.findall(r"\bNodes=(\S+)", text) for name in slurm.expand(nodes)}
