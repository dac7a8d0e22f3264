"""Choice of the nodes and resources that train a run on a cluster, and of those for its other rules, from
Slurm's answers.

A pure function of the answers and of what the user has asked for.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from forge.core.errors import ConfigError
from forge.hosts.allocation import BEFORE_TRAINING_MIN
from forge.plugins.site.site_places import Place, Site
from forge.slurm.site import SiteAnswers

BEFORE_MIN = 2 * BEFORE_TRAINING_MIN  # stage and preflight
WEEK_MIN = 7 * 24 * 60  # a job's time where Slurm has no limit
USUAL_NODES = 2
CPU_RANKS = 2  # a node


@dataclass(frozen=True)
class Wishes:
    """Wishes of the user; None or "" is left to the choice. gpus: of a node."""

    partition: str = ""
    gpus: int | None = None
    nodes: int | None = None


@dataclass(frozen=True)
class Size:
    """Request of a run, with the rules that limit it. Of a node: ranks, cpus_per_task, mem_mb.
    most_nodes: by the rule nodes_rule. minutes: of training."""

    nodes: int
    ranks: int
    cpus_per_task: int
    mem_mb: int
    minutes: int
    most_nodes: float
    nodes_rule: str
    minutes_rule: str


@dataclass(frozen=True)
class Choice:
    """All that a profile says of a cluster. rules: where rules of one node run, None where no partition
    is known for them. others: further places for training. closed: partitions with GPUs that no account
    of the user opens."""

    site: Site
    train: Place
    size: Size
    rules: Place | None
    others: tuple[Place, ...]
    closed: tuple[str, ...]

    @property
    def uses_gpus(self) -> bool:
        return self.train.model is not None


# --- the best place -------------------------------------------------------------------------------


def _worth(place: Place) -> tuple[object, ...]:
    """The smaller the better, for training."""
    rank, size = (place.model.rank, place.model.memory_gib or 0) if place.model else (0, 0)
    return (
        place.partition.state != "UP" or not place.num_available,
        not place.is_visible,
        place.is_for_trials,
        rank,
        -size,
        bool(place.preemption.mode),
        -min(place.minutes[0], WEEK_MIN),
        not place.partition.is_default,
        -len(place.nodes),
        place.partition.name,
    )


def _worth_without_gpus(place: Place) -> tuple[object, ...]:
    """The smaller the better, for ranks and rules on CPUs: the usual partition, not the longest."""
    away, hidden, trials, *rest = _worth(replace(place, model=None))
    is_mixed = bool(place.others)
    is_cancelled = place.preemption.mode == "CANCEL"
    is_default = place.partition.is_default
    return (
        away,
        hidden,
        place.model is not None,
        is_mixed,
        is_cancelled,
        trials,
        not is_default,
        *rest,
    )


def choose(answers: SiteAnswers, wishes: Wishes) -> Choice:
    """The best place for training and for other rules. Raises ConfigError for wishes that Slurm would
    refuse, and where all GPUs are of a maker that Forge does not support."""
    _refuse_numbers(wishes)
    site = Site(answers)
    places = _asked_partition(site, wishes) if wishes.partition else site.places()
    fitting = _with_gpus(places, wishes) or _without_gpus(places, wishes)
    possible = [place for place in fitting if _allows(place, replace(wishes, nodes=None))]
    best, *others = possible or fitting
    size = size_of(best, wishes, others)
    rules = [p for p in site.places() if _suits_rules(p)]
    closed = [] if wishes.partition else _closed(site)
    return Choice(
        site,
        best,
        size,
        min(rules, key=_worth_without_gpus, default=None),
        tuple(others),
        tuple(closed),
    )


def _refuse_numbers(wishes: Wishes) -> None:
    if wishes.gpus is not None and wishes.gpus < 0:
        raise ConfigError(f"--gpus {wishes.gpus}", fix="GPUs of a node: 1 or more, 0 for CPUs")
    if wishes.nodes is not None and wishes.nodes < 1:
        raise ConfigError(f"--nodes {wishes.nodes}", fix="nodes that train: 1 or more")


def _most_nodes(place: Place) -> float:
    return min(len(place.nodes), place.at_most("node")[0])


def _suits_rules(place: Place) -> bool:
    is_open = place.partition.state == "UP" and place.is_visible and not place.needs_gpus
    return is_open and place.preemption.mode != "CANCEL" and bool(place.nodes)


def _closed(site: Site) -> list[str]:
    return sorted(
        name
        for name, partition in site.partitions.items()
        if not site.is_open(partition) and any(node.gpus for node in partition.nodes)
    )


def _asked_partition(site: Site, wishes: Wishes) -> list[Place]:
    """The places in the partition of --partition. Raises ConfigError."""
    name = wishes.partition
    partition = site.partitions.get(name)
    if partition is None:
        close = difflib.get_close_matches(name, site.partitions, n=1)
        raise ConfigError(
            f"--partition {name}: no such partition{f' (did you mean {close[0]}?)' if close else ''}",
            fix=f"partitions are: {', '.join(site.partitions)}",
        )
    if partition.state in ("DRAIN", "INACTIVE"):
        raise ConfigError(
            f"--partition {name} is {partition.state} and takes no jobs",
            fix="name another one, or leave --partition out",
        )
    if not site.is_open(partition):
        own = ", ".join(dict.fromkeys(a.account for a in site.associations)) or "not known"
        admitted = ", ".join(sorted(partition.accounts)) or "all accounts, of some QOS only"
        raise ConfigError(
            f"--partition {name} admits {admitted}; your accounts are {own}",
            fix="ask the administrators for access, or name another partition",
        )
    places = site.places_in(partition)
    if not places:
        has = (
            "parts of GPUs (MIG) only, and ranks need whole ones" if partition.nodes else "no nodes"
        )
        raise ConfigError(f"--partition {name} has {has}", fix="name another partition")
    return places


def _with_gpus(places: Sequence[Place], wishes: Wishes) -> list[Place]:
    """Places with GPUs that Forge can use, best first; [] where none is wanted, or there is none. Raises
    ConfigError for more GPUs than nodes have, and where all are of another maker."""
    if wishes.gpus == 0:
        return []
    with_gpus = [place for place in places if place.model]
    ours = [place for place in with_gpus if place.model and not place.model.maker]
    if with_gpus and not ours:
        _refuse_makers(with_gpus)
    usable = [place for place in ours if place.at_most("gres/gpu")[0] >= 1]
    wanted = wishes.gpus or 1
    enough = [place for place in usable if _gpus(place) >= wanted]
    if (wanted > 1 and not enough) or (wishes.gpus and not usable):
        most = max(usable, key=_gpus, default=None)
        where = f"{most.partition.name} has {_gpus(most)}" if most else "no node has any"
        rule = most.at_most("gres/gpu")[1] if most and _gpus(most) < most.gpus else ""
        raise ConfigError(
            f"--gpus {wanted}: {where}{f' ({rule})' if rule else ''}",
            cause="--gpus is the number of GPUs of one node",
            fix=f"--gpus {_gpus(most)} --nodes N"
            if most
            else "--gpus 0 for a profile of CPU nodes",
        )
    return sorted((_on_full_nodes(place, wishes.gpus) for place in enough), key=_worth)


def _on_full_nodes(place: Place, gpus: int | None) -> Place:
    """The place without nodes that have fewer GPUs than wanted; than usual for None."""
    wanted = gpus or _gpus(place)
    nodes = [node for node in place.nodes if dict(node.gpus)[place.kind] >= wanted]
    return replace(place, nodes=tuple(nodes))


def _refuse_makers(places: Sequence[Place]) -> None:
    found = sorted({f"{p.model.maker} {p.model.name}" for p in places if p.model})
    where = sorted({place.partition.name for place in places})
    raise ConfigError(
        f"the GPUs of {', '.join(where)} are {', '.join(found)}: Forge supports NVIDIA's only, so no"
        " profile was written",
        fix="`--gpus 0` makes a profile for training on CPU nodes",
    )


def _without_gpus(places: Sequence[Place], wishes: Wishes) -> list[Place]:
    """Places for ranks on CPUs, best first. Raises ConfigError where there is none."""
    usable = [place for place in places if place.nodes and not place.needs_gpus]
    if not usable:
        raise ConfigError(
            "no partition here is open to an account of yours",
            cause="`sacctmgr show assoc` and AllowAccounts of `scontrol show partition` do"
            " not fit together, or all partitions are down",
            fix="ask the administrators for an account",
        )
    usable.sort(key=lambda place: (_most_nodes(place) < USUAL_NODES, _worth_without_gpus(place)))
    return [replace(place, model=None, kind="", gpus=0) for place in usable]


def _gpus(place: Place) -> int:
    """GPUs of a node that one job gets."""
    return int(min(place.gpus, place.at_most("gres/gpu")[0]))


# --- how much of it --------------------------------------------------------------------------------


def size_of(place: Place, wishes: Wishes, others: Sequence[Place]) -> Size:
    """Ranks, cores, memory, time and nodes within all limits of the place. others: to name in a refusal.
    Raises ConfigError for --nodes that its limits do not allow."""
    ranks = wishes.gpus or _gpus(place) if place.model else CPU_RANKS
    shares = [node_share(place, index, ranks) for index in range(len(place.nodes))]
    cpus = int(min(*(cpus for cpus, _ in shares), place.at_most("cpu")[0]))
    ranks = ranks if place.model else min(ranks, cpus)
    threads = max(node.threads_per_core for node in place.nodes)
    per_rank = max(1, cpus // ranks)
    per_rank -= per_rank % threads if per_rank > threads else 0
    per_cpu = place.partition.max_memory_per_cpu * per_rank * ranks
    mem_mb = _rounded(min(*(mb for _, mb in shares), place.at_most("mem")[0], per_cpu))
    minutes, minutes_rule = _training_minutes(place)
    use = {"node": 1.0, "gres/gpu": ranks, "cpu": ranks * per_rank, "mem": mem_mb}
    if not place.model:
        del use["gres/gpu"]
    most, rule = min(_node_limits(place, use))
    nodes = _nodes(place, wishes, most, rule, others)
    return Size(nodes, ranks, per_rank, mem_mb, minutes, most, rule, minutes_rule)


def node_share(place: Place, index: int, ranks: int) -> tuple[int, int]:
    """Cores and MB of a node that belong to so many of its GPUs; all of them without GPUs."""
    node = place.nodes[index]
    if not place.model:
        return node.cpus, node.memory_mb
    of_node = max(ranks, dict(node.gpus)[place.kind])
    return node.cpus * ranks // of_node, node.memory_mb * ranks // of_node


def _rounded(mb: float) -> int:
    """Down to a number that people read, GB from 10 GB on."""
    unit = 1000 if mb >= 10_000 else 100
    return int(mb // unit * unit) or int(mb)


def _training_minutes(place: Place) -> tuple[int, str]:
    most, rule = place.minutes
    if math.isinf(most):
        return WEEK_MIN - BEFORE_MIN, "no limit here: 7 days"
    if most <= BEFORE_MIN:
        raise ConfigError(
            f"partition {place.partition.name} gives jobs {most:g} minutes ({rule}), of which stage and"
            f" preflight have {BEFORE_MIN}",
            fix="name another partition: --partition NAME",
        )
    return int(most) - BEFORE_MIN, rule


def _node_limits(place: Place, use: dict[str, float]) -> Iterator[tuple[float, str]]:
    """The most nodes by each rule. use: what a job uses of each node."""
    yield (
        float(len(place.nodes)),
        f"partition {place.partition.name} has {len(place.nodes)} such nodes",
    )
    for limit in place.limits:
        for some in (limit.of_job, limit.of_all):
            for name, most in some.items():
                resource = name.partition(":")[0]
                is_of_kind = name in (resource, f"{resource}:{place.kind}")
                if is_of_kind and use.get(resource) and not math.isinf(most):
                    yield max(1.0, most // use[resource]), f"{limit.name}: {name}={most:g}"


def _nodes(place: Place, wishes: Wishes, most: float, rule: str, others: Sequence[Place]) -> int:
    least = place.least_nodes
    wanted = max(least, min(USUAL_NODES, int(most))) if wishes.nodes is None else wishes.nodes
    if wanted > most:
        elsewhere = [p for p in others if _allows(p, replace(wishes, nodes=wanted))]
        instead = f", or --partition {elsewhere[0].partition.name}" if elsewhere else ""
        raise ConfigError(
            f"--nodes {wanted} is more than {most:g}: {rule}",
            fix=f"--nodes {most:g}{instead}",
        )
    if wanted < least:
        raise ConfigError(
            f"--nodes {wanted}: partition {place.partition.name} gives {least} or more (MinNodes)",
            fix=f"--nodes {least}, or another partition",
        )
    return wanted


def _allows(place: Place, wishes: Wishes) -> bool:
    try:
        size_of(place, wishes, [])
    except ConfigError:
        return False
    return True
