"""Checks before submission: could Slurm ever start these jobs?

A job that can never start stays PENDING without a message. `sbatch --test-only` (22.05) accepts such
jobs (time limit, partition that is down, account), and rejects others only because their nodes are
drained. So the limits are read from the partitions, and sbatch checks the rest.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from forge.core.errors import ConfigError
from forge.core.terminal import one_line
from forge.core.values import shown
from forge.slurm import slurm
from forge.slurm.partitions import Node, Partition, read_partitions
from forge.slurm.sbatch import Request

TEST_SEC = 60.0  # sbatch --test-only plans the whole queue on a busy controller

# The error of --test-only for nodes that are drained, down or reserved, and for missing ones.
_NO_NODES = "Requested node configuration is not available"
# Its errors for reasons that pass by themselves (slurm_errno.c of 22.05).
_PASSING = ("Requested nodes are busy", "Required node not available", "not available now")


def check(requests: Sequence[Request], say: Callable[[str], None]) -> None:
    """ConfigError, with the numbers to set, for requests that Slurm could never start. For those that it
    could start later (nodes drained, down or reserved; partition down), `say` a warning."""
    _check_cluster()
    accounts = {request.account: request.profile_keys for request in reversed(requests)}
    for account, keys in accounts.items():
        _check_account(account, keys, say)
    partitions = _known_partitions(say)
    troubles = [
        problem
        for request in requests
        for problem in problems(request, _as_its_qos_has_them(partitions, request.qos))
    ]
    if troubles:
        raise ConfigError(
            "\n".join(dict.fromkeys(problem for problem, _ in troubles)),
            cause="Slurm would refuse the job, or accept it and never start it",
            fix="\n         ".join(dict.fromkeys(fix for _, fix in troubles)),
        )
    for request in requests:
        for partition in asked_partitions(request, partitions):
            if partition.state == "DOWN":
                say(
                    f"partition {partition.name} is DOWN: {request.name} waits in the queue until"
                    " the administrators set it UP"
                )
        _ask_sbatch(request, partitions, say)


def _check_cluster() -> None:
    """ConfigError unless all commands of Slurm ask one and the same cluster, which answers."""
    cluster, names = slurm.chosen_cluster(), " or ".join(slurm.CLUSTERS)
    if not cluster:
        return
    fix = f"unset {names}, or name one cluster of `sacctmgr show clusters`"
    if cluster == "all" or "," in cluster:
        cause = "a job that goes to one of several clusters is not found again"
        raise ConfigError(f"{names} is {cluster!r}: not one cluster", cause=cause, fix=fix)
    try:
        slurm.ask("scontrol", "show", "config")
    except slurm.Refused as err:
        raise ConfigError(f"{names} is {cluster!r}: {one_line(str(err))}", fix=fix) from None


def _check_account(accounts: str, keys: str, say: Callable[[str], None]) -> None:
    from snakemake_executor_plugin_slurm.accounts import validate_account
    from snakemake_interface_common.exceptions import WorkflowError

    for account in filter(None, re.split(r"[,\s]+", accounts)):
        try:
            validate_account(account, logging.getLogger(__name__))
        except (WorkflowError, OSError) as err:
            if slurm.is_silence(str(err)):  # as the submission does, which waits for it
                say(f"account {account} is not checked: Slurm's accounting does not answer")
                return
            raise ConfigError(
                f"slurm_account {account} ({keys}): {err}",
                fix="edit this line in config.yaml of the profile",
            ) from None


def _known_partitions(say: Callable[[str], None]) -> dict[str, Partition]:
    try:
        return read_partitions()
    except (slurm.SlurmSilent, slurm.Refused) as err:
        say(f"limits of the partitions are not checked: {err}")
        return {}


def _as_its_qos_has_them(known: dict[str, Partition], qos: str) -> dict[str, Partition]:
    """The partitions, without the limits that this QOS lifts (man sacctmgr, SPECIFICATIONS FOR QOS)."""
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


def problems(request: Request, known: Mapping[str, Partition]) -> list[tuple[str, str]]:
    """Why no partition could ever start this request, each with its fix; [] when one could."""
    troubles = [_problems_in(partition, request) for partition in asked_partitions(request, known)]
    return [problem for each in troubles for problem in each] if all(troubles) else []


def _problems_in(partition: Partition, request: Request) -> list[tuple[str, str]]:
    keys, asks = request.profile_keys, f"{request.name} asks partition {partition.name} for"
    troubles = []
    if request.account and not any(map(partition.accepts, request.account.split(","))):
        allowed = ", ".join(sorted(partition.accounts)) or "not this one"
        troubles.append(
            (
                f"{request.name}: partition {partition.name} does not admit account"
                f" {request.account} (it admits: {allowed})",
                f"set another slurm_partition or slurm_account ({keys})",
            )
        )
    if partition.state in ("DRAIN", "INACTIVE"):
        troubles.append(
            (
                f"{request.name}: partition {partition.name} is {partition.state} and takes no jobs",
                f"set another slurm_partition ({keys}), or ask the administrators",
            )
        )
    if request.minutes > partition.max_minutes:
        troubles.append((_time_problem(asks, request, partition), _time_fix(request, partition)))
    return troubles + _node_problems(asks, request, partition)


def _time_problem(asks: str, request: Request, partition: Partition) -> str:
    sum_of = f" ({request.other_minutes} of them for stage and preflight)"
    return (
        f"{asks} {request.minutes} minutes{sum_of if request.is_allocation else ''}, its limit"
        f" (MaxTime) is {partition.max_minutes:g}"
    )


def _time_fix(request: Request, partition: Partition) -> str:
    room = int(partition.max_minutes) - request.other_minutes
    if room < 1:
        return f"set a slurm_partition with a longer MaxTime ({request.profile_keys})"
    return f"set runtime: {room} or less ({request.profile_keys})"


def _node_problems(asks: str, request: Request, partition: Partition) -> list[tuple[str, str]]:
    most = (
        min(partition.max_nodes, len(partition.nodes)) if partition.nodes else partition.max_nodes
    )
    if request.nodes > most:
        limit = "MaxNodes" if partition.max_nodes == most else "TotalNodes"
        what = f"{asks} {request.nodes} nodes, it gives {most:g} ({limit})"
        return [
            (what, f"set nodes: {most:g} or less, spare_nodes included ({request.profile_keys})")
        ]
    if request.nodes < partition.min_nodes:
        what = (
            f"{asks} {request.nodes} nodes, it gives no less than {partition.min_nodes} (MinNodes)"
        )
        return [(what, f"set another slurm_partition ({request.profile_keys})")]
    if not partition.nodes:
        return []
    return _size_problems(asks, request, partition)


def _size_problems(asks: str, request: Request, partition: Partition) -> list[tuple[str, str]]:
    """The sizes that too few nodes have, or that too few nodes have all sizes at once."""
    excluded = request.excluded
    usable = [node for node in partition.nodes if node.name not in excluded]
    if len(usable) < request.nodes:
        what = (
            f"{asks} {request.nodes} nodes, and {len(usable)} of its {len(partition.nodes)} are left:"
            f" excluded are {', '.join(sorted(excluded))}"
        )
        return [(what, "look into results/RUN/bad_nodes.txt, slurm.exclude and slurm.options")]
    model, gpus = request.gpus
    sizes = {
        ("cores a node", _cores_key(request), request.cpus): [n.cpus for n in usable],
        ("MB a node", "mem_mb", request.mem_mb): [n.memory_mb for n in usable],
        (f"{model} GPUs a node".strip(), "gres", gpus): [n.num_gpus(model) for n in usable],
    }
    troubles = []
    for (unit, key, wanted), offered in sizes.items():
        most = sorted(offered, reverse=True)[request.nodes - 1]
        if wanted > most:
            what = f"{asks} {wanted} {unit}, {request.nodes} of its nodes have {most}"
            fix = f"set {key} for {most} {unit} or less"
            if key == "gres" and not most:
                fix = f"set gres to what its nodes have ({_gpus_of(usable)})"
            troubles.append((what, f"{fix} ({request.profile_keys})"))
    fitting = fitting_nodes(request, partition)
    if not troubles and len(fitting) < request.nodes:
        what = (
            f"{asks} {request.nodes} nodes with {request.cpus} cores, {request.mem_mb} MB"
            f"{f', {gpus} GPUs' if gpus else ''}"
            f"{f', feature {request.constraint}' if request.features else ''} each;"
            f" {len(fitting)} of its {len(partition.nodes)} have all of this"
        )
        troubles.append(
            (what, f"lower them ({request.profile_keys}); `sinfo -N -o '%N %c %m %G %f'` shows")
        )
    return troubles


def _gpus_of(nodes: Sequence[Node]) -> str:
    """The GPUs of nodes as `gres` takes them: `gpu:a100:4 on 12 nodes, none on 3`."""
    kinds = Counter(", ".join(_gres(*gpus) for gpus in node.gpus) or "none" for node in nodes)
    return ", ".join(f"{kind} on {count} nodes" for kind, count in kinds.most_common())


def _gres(model: str, count: int) -> str:
    return f"gpu:{model}:{count}" if model else f"gpu:{count}"


def _cores_key(request: Request) -> str:
    if request.is_allocation:
        return "tasks_per_node x cpus_per_task"
    return f"set-threads of {request.rules[0]}"


def fitting_nodes(request: Request, partition: Partition) -> list[Node]:
    """The nodes of the partition that are large enough, in any state."""
    model, gpus = request.gpus
    excluded = request.excluded
    return [
        node
        for node in partition.nodes
        if node.name not in excluded
        and node.cpus >= request.cpus
        and node.memory_mb >= request.mem_mb
        and node.num_gpus(model) >= gpus
        and request.features <= node.features
    ]


def nodes_to_avoid(request: Request, trained: Collection[str]) -> list[str]:
    """The nodes of its partitions that have trained, for a job that should run on others; [] where no
    other is large enough and up, and where Slurm does not answer."""
    try:
        known = read_partitions(patience_sec=0)
    except (slurm.SlurmSilent, slurm.Refused):
        return []
    partitions = asked_partitions(request, known)
    up = {n.name for p in partitions for n in fitting_nodes(request, p) if n.is_available}
    there = {node.name for partition in partitions for node in partition.nodes}
    return sorted(there & set(trained)) if up - set(trained) else []


# --- shared storage --------------------------------------------------------------------------------


def check_folders(folders: Iterable[Path], say: Callable[[str], None]) -> None:
    """Warn about directories that other nodes probably do not see: no error, this may be a node. One line
    for a directory and those below it.

    Raises ConfigError for a name that would not reach the job: the executor plugin passes the job's
    command to sbatch in double quotes (--wrap), where the shell replaces some characters.
    """
    told: list[Path] = []
    for folder in dict.fromkeys(folder.resolve() for folder in folders):
        if special := sorted({*"$`\\"} & {*str(folder)}):
            raise ConfigError(
                f"a Slurm job cannot be given the path {shown(str(folder))}:"
                f" the shell replaces {' and '.join(special)} in it",
                fix="rename the directory; blanks, quotes and semicolons do no harm",
            )
        if (storage := _local_storage(folder)) and not any(map(folder.is_relative_to, told)):
            told.append(folder)
            say(
                f"{folder} is on {storage} of this machine: other machines do not see it, and a job"
                " there ends without a log. Move it to shared storage"
            )


def _local_storage(folder: Path) -> str:
    """The local storage of a directory, `the /tmp` or `a tmpfs`; "" for another file system."""
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


# --- the check of sbatch ---------------------------------------------------------------------------


def _ask_sbatch(
    request: Request, known: Mapping[str, Partition], say: Callable[[str], None]
) -> None:
    """ConfigError for a request that sbatch would always refuse. Only the executor would see that error
    for a group of rules."""
    trouble = _trouble_of(request.options)
    if _NO_NODES in trouble and (others := _without_nodelist(request.options)) != request.options:
        # --test-only (22.05) refuses a list with fewer nodes than the job asks for; sbatch takes it.
        trouble = _trouble_of(others)
    if not trouble or slurm.is_silence(trouble):
        return
    if reason := slurm.submit_limit(trouble) or _passing_reason(trouble, request, known):
        say(f"{request.name} waits in the queue: {reason}")
    elif "allocation failure" in trouble or trouble.startswith("sbatch: "):
        partitions = f"partitions are: {', '.join(known)}; " if known else ""
        raise ConfigError(
            f"Slurm would not start {request.name}: sbatch {shlex.join(request.options)}\n  {trouble}",
            fix=f"edit {request.profile_keys} in config.yaml of the profile, or slurm.options in"
            f" machine.yaml; {partitions}`sinfo` and `sacctmgr show assoc` tell what there is",
        )


def _trouble_of(options: Sequence[str]) -> str:
    line = ["sbatch", "--test-only", *options, "--wrap=true"]
    return slurm.run(line, timeout_sec=TEST_SEC, submits=True)[1]


def _without_nodelist(options: Sequence[str]) -> tuple[str, ...]:
    """The options without nodes that the job must have (--nodelist, -w)."""
    left, is_value = [], False
    for word in options:
        is_list = not is_value and word.startswith(("--nodelist", "-w"))
        if not is_list and not is_value:
            left.append(word)
        is_value = is_list and word in ("--nodelist", "-w")
    return tuple(left)


def _passing_reason(trouble: str, request: Request, known: Mapping[str, Partition]) -> str:
    """The reason for which the job would wait; "" for one that never passes.

    The error of --test-only is the same for missing nodes and for those that are drained, down or
    reserved. Since `problems` found enough nodes, it is about the latter if any is not up.
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
    """Nodes of all reservations, also of later ones, which --test-only does not consider."""
    try:
        text = slurm.ask("scontrol", "show", "reservation", "--oneliner", patience_sec=0)
    except (slurm.SlurmSilent, slurm.Refused):
        return set()
    return {name for nodes in re.findall(r"\bNodes=(\S+)", text) for name in slurm.expand(nodes)}
