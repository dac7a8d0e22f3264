"""Places of a cluster: nodes of one kind in a partition, the account whose jobs run there, and all that
limits these."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from forge.plugins.site.gpu_models import GpuModel, is_slice, model_of
from forge.slurm.accounts import Association, Limits, Qos, read_associations, read_qos
from forge.slurm.partitions import Node, Partition
from forge.slurm.site import SiteAnswers

_SHORT_MIN = 240  # partitions for trials have less
_FOR_TRIALS = re.compile(r"debug|dev|test|interactive|jupyter|viz|visual|login|copy|transfer|xfer")


@dataclass(frozen=True)
class Preemption:
    """Treatment of jobs that Slurm takes nodes from. mode: REQUEUE, CANCEL or SUSPEND; "" where nobody
    takes their nodes. by: whose jobs do. grace_sec: from SIGTERM to SIGKILL."""

    mode: str = ""
    by: str = ""
    grace_sec: int = 0


@dataclass(frozen=True)
class Place:
    """Nodes of one kind in a partition, and the account whose jobs run there.

    model, kind: of their GPUs, as is known of it and as Slurm names it; None and "" without. gpus: of a
    node. association: None where Slurm shows none. qos: of the job; "" where Slurm shows none. others:
    kinds of GPUs that other nodes of the partition have.
    """

    partition: Partition
    nodes: tuple[Node, ...]
    limits: tuple[Limits, ...]
    preemption: Preemption
    association: Association | None = None
    qos: str = ""
    is_visible: bool = True
    model: GpuModel | None = None
    kind: str = ""
    gpus: int = 0
    others: frozenset[str] = frozenset()

    @property
    def account(self) -> str:
        return self.association.account if self.association else ""

    @cached_property
    def minutes(self) -> tuple[float, str]:
        """The longest job, and the rule that says so."""
        return min(
            ((limit.max_minutes, limit.name) for limit in self.limits), default=(math.inf, "")
        )

    @property
    def least_nodes(self) -> int:
        """Nodes that a job must have."""
        wanted = [limit.least.get("node", 1) for limit in self.limits]
        return int(max(1, self.partition.min_nodes, *wanted))

    @property
    def unusual_qos(self) -> str:
        """The QOS that a job must name; "" where it is the usual one of the account."""
        is_usual = self.association is None or self.qos == self.association.usual_qos
        return "" if is_usual else self.qos

    @property
    def num_available(self) -> int:
        return sum(node.is_available for node in self.nodes)

    @property
    def needs_gpus(self) -> bool:
        """Return whether a QOS refuses jobs without GPUs."""
        return any(name.startswith("gres/gpu") for limit in self.limits for name in limit.least)

    @property
    def is_for_trials(self) -> bool:
        return bool(_FOR_TRIALS.search(self.partition.name.lower())) or self.minutes[0] < _SHORT_MIN

    def at_most(self, resource: str) -> tuple[float, str]:
        """The most of a resource on one node, and the rule that says so."""
        names = {resource, f"{resource}:{self.kind}"} if resource == "gres/gpu" else {resource}
        found = [
            (some[name], f"{limit.name}: {name}={some[name]:g}")
            for limit in self.limits
            for some in (limit.of_node, limit.of_job, limit.of_all)
            for name in names & some.keys()
        ]
        return min(found, default=(math.inf, ""))


class Site:
    """Slurm's answers as places."""

    def __init__(self, answers: SiteAnswers) -> None:
        self.answers = answers
        self.settings = answers.settings
        self.partitions = answers.partitions()
        self.visible = {line.strip() for line in answers.answer("visible").lines}
        cluster = self.settings.get("ClusterName", "")
        rows, users = (answers.answer(name).rows for name in ("associations", "user"))
        self.associations = read_associations(rows, users, cluster)
        self.qos = read_qos(answers.answer("qos").rows)

    @property
    def has_accounts(self) -> bool:
        """Return whether jobs belong to accounts; also where accounting did not answer."""
        kept = self.settings.get("AccountingStorageType", "")
        return bool(self.associations) or "slurmdbd" in kept

    def is_open_to_all(self, partition: Partition) -> bool:
        """Return whether the user has no account, and the partition asks for none; also where accounting
        does not answer, and nobody knows."""
        is_unknown = bool(self.answers.answer("associations").error)
        return not self.associations and (is_unknown or not partition.accounts)

    def is_open(self, partition: Partition) -> bool:
        """Return whether an account of the user may run jobs there."""
        return self.is_open_to_all(partition) or any(a.opens(partition) for a in self.associations)

    def places(self) -> list[Place]:
        """All places that some account of the user opens, those for training as well as others."""
        open_ones = [p for p in self.partitions.values() if not p.is_closed]
        return [place for partition in open_ones for place in self.places_in(partition)]

    def places_in(self, partition: Partition) -> list[Place]:
        """One place for each kind of the partition's nodes, of the first account that opens it."""
        association = next((a for a in self.associations if a.opens(partition)), None)
        if association is None and not self.is_open_to_all(partition):
            return []
        if partition.state in ("DRAIN", "INACTIVE"):
            return []
        names = association.qos_in(partition) if association else [""]
        places = [self._place(partition, association, name) for name in names]
        return _by_kind(min(places, key=_worth_of_qos))

    def qos_besides(self, place: Place) -> list[Place]:
        """The place with each other QOS that the account may have there."""
        if not place.association:
            return []
        names = [n for n in place.association.qos_in(place.partition) if n != place.qos]
        return [self._place(place.partition, place.association, name) for name in names]

    def _place(self, partition: Partition, association: Association | None, name: str) -> Place:
        qos = self.qos.get(name)
        return Place(
            partition=partition,
            nodes=partition.nodes,
            limits=tuple(self._limits(partition, association, qos)),
            preemption=self._preemption(partition, qos),
            association=association,
            qos=name,
            is_visible=not self.visible or partition.name in self.visible,
        )

    def _limits(
        self, partition: Partition, association: Association | None, qos: Qos | None
    ) -> Iterable[Limits]:
        lifted = qos.flags if qos else frozenset()
        yield Limits(
            name=f"partition {partition.name}",
            max_minutes=math.inf if "PartitionTimeLimit" in lifted else partition.max_minutes,
            of_job={} if "PartitionMaxNodes" in lifted else {"node": partition.max_nodes},
        )
        if association:
            yield association.limits
        for one in (qos, self.qos.get(partition.qos)):
            if one:
                yield one.limits

    def _preemption(self, partition: Partition, qos: Qos | None) -> Preemption:
        kind = self.settings.get("PreemptType", "")
        usual = self.settings.get("PreemptMode", "")
        if "qos" in kind and qos:
            by = [other.name for other in self.qos.values() if qos.name in other.preempts]
            mode = qos.preempt_mode if qos.preempt_mode not in ("", "CLUSTER") else usual
            grace = int(qos.grace_sec)
            whose = f"jobs of QOS {', '.join(sorted(by))}"
        elif "partition_prio" in kind:
            names = {node.name for node in partition.nodes}
            by = [
                other.name
                for other in self.partitions.values()
                if other.tier > partition.tier and names & {node.name for node in other.nodes}
            ]
            mode, grace = partition.preempt_mode or usual, partition.grace_sec
            whose = f"jobs in partition {', '.join(sorted(by))}"
        else:
            return Preemption()
        found = re.search("REQUEUE|CANCEL|SUSPEND", mode.upper())
        return Preemption(found[0], whose, grace) if by and found else Preemption()


def _worth_of_qos(place: Place) -> tuple[object, ...]:
    """The smaller the better: the usual one, unless that is for trials or for very large jobs."""
    is_usual = place.association is None or place.qos == place.association.usual_qos
    is_for_trials = bool(_FOR_TRIALS.search(place.qos)) or place.is_for_trials
    is_preempted, longest = bool(place.preemption.mode), -place.minutes[0]
    return place.least_nodes > 2, is_for_trials, not is_usual, is_preempted, longest, place.qos


def _by_kind(place: Place) -> list[Place]:
    """The place divided by the GPUs of its nodes."""
    kinds: dict[tuple[str, GpuModel | None], list[Node]] = defaultdict(list)
    for node in place.nodes:
        full = [(kind, count) for kind, count in node.gpus if not is_slice(kind)]
        if not node.gpus:
            kinds["", None].append(node)
        for kind, _ in full:
            kinds[kind, model_of(kind, node.features)].append(node)
    names = frozenset(model.text for _, model in kinds if model)
    return [
        replace(
            place,
            nodes=tuple(nodes),
            kind=kind,
            model=model,
            gpus=_usual_gpus(nodes, kind) if model else 0,
            others=names - {model.text if model else ""},
        )
        for (kind, model), nodes in kinds.items()
    ]


def _usual_gpus(nodes: Sequence[Node], kind: str) -> int:
    counts = Counter(dict(node.gpus)[kind] for node in nodes)
    return max(counts, key=lambda count: (counts[count], count))
