"""Check and compare all nodes of an allocation: which are healthy, and why the others are not."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forge.cluster.nodes import NodeFailure, NodePool
from forge.cluster.placement import Placement
from forge.core.machine import Machine
from forge.preflight.node_checks import Check, Wanted, check_node, reach_sec

# A packet of a new connection that was lost is sent again after 1 s, and again 2 s later.
CONNECT_SEC = 4.0

# Troubles of a node's own, also where every node of the allocation has them. What else fails on all
# nodes is a mistake in the settings, such as data that was never made.
OWN = ("local disk", "memory", "gpus")
# One of two nodes is at fault and nobody can tell which: neither is held to be bad.
UNCLEAR = "one of two"
EXCLUDE_ONE = "exclude one of the two (slurm.exclude), or set preflight.spare_nodes: 1"


@dataclass
class Node:
    """One node: its checks, and facts that are compared with those of others."""

    name: str
    checks: list[Check]
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.status == "fail"]

    @property
    def is_fit(self) -> bool:
        return not self.failed

    @property
    def reason(self) -> str:
        """Why it is not fit, in one line."""
        return "; ".join(f"{check.name}: {check.message}" for check in self.failed)

    @property
    def line(self) -> str:
        """One line for the node, as people of clusters know it."""
        versions = self.facts.get("versions", {})
        parts = [f"NODE {self.name} {'OK' if self.is_fit else 'FAIL'}"]
        parts += [f"PY {versions['python']}"] if versions else []
        parts += [f"torch {versions['torch']}"] if versions.get("torch") else []
        shown = {
            **{"project": "proj", "packages": "pkgs", "data": "data", "disk": "disk"},
            **{"reach": "net", "answers": "answers"},
        }
        by_name = {check.name: check.status for check in self.checks}
        parts += [f"{short}={by_name[name]}" for name, short in shown.items() if name in by_name]
        return " ".join(parts)


def inspect(
    placement: Placement, wanted: Mapping[str, Wanted], machine: Machine, *, sec: float, python: str
) -> list[Node]:
    """Every node of the placement with its checks, in the placement's order, within about `sec` seconds.

    python: what runs our code on other nodes.
    """
    head = placement.hosts[0]
    if placement.is_here:
        return [_answered(head, check_node(**wanted[head].to_json()))]
    with NodePool(placement, python=python, start_sec=sec / 2) as pool:
        each = {host: wish.to_json() for host, wish in wanted.items()}
        answers = pool.ask("check_node", each=each, timeout_sec=sec / 4)
        nodes = {host: _answered(host, answer) for host, answer in answers.items()}
        ways = _ways(pool, [node for node in nodes.values() if node.facts], machine, head, sec / 4)
    compare(list(nodes.values()), machine)
    judge_ways(nodes, ways)
    judge_clocks(nodes, ways, machine.preflight.max_clock_skew_sec)
    return list(nodes.values())


def _answered(host: str, answer: Any) -> Node:
    if isinstance(answer, NodeFailure):
        trouble = Check("answers", "fail", answer.message, answer.fix, answer.cause)
        return Node(host, [trouble])
    checks = [Check(**check) for check in answer.pop("checks")]
    return Node(host, checks, answer)


# --- the way from each to each --------------------------------------------------------------------

Ways = dict[str, dict[str, dict[str, Any]]]  # from, to: trouble ("" for none), ahead_sec


def _ways(pool: NodePool, nodes: Sequence[Node], machine: Machine, head: str, sec: float) -> Ways:
    """What each node says of its way to each other one. Adds the trouble of those that cannot."""
    by_name = {node.name: node for node in nodes}
    settings = machine.model_dump(mode="json")
    listening = pool.ask("listen", hosts=by_name, timeout_sec=sec, machine=settings, head=head)
    listeners = _of_those_that_can(listening, by_name)
    if len(listeners) < 2:
        return {}
    ways = pool.ask(
        "reach",
        hosts=listeners,
        timeout_sec=sec + reach_sec(len(listeners), CONNECT_SEC),
        listeners=listeners,
        head=head,
        patience_sec=CONNECT_SEC,
    )
    return _of_those_that_can(ways, by_name)


def _of_those_that_can(answers: dict[str, Any], nodes: dict[str, Node]) -> dict[str, Any]:
    for host, answer in answers.items():
        if isinstance(answer, NodeFailure):
            fix = answer.fix or f"leave {host} out, or see its network"
            nodes[host].checks.append(Check("reach", "fail", answer.message, fix, answer.cause))
    return {host: a for host, a in answers.items() if not isinstance(a, NodeFailure)}


def judge_ways(nodes: Mapping[str, Node], ways: Ways) -> None:
    """Add the check `reach`: the fewest nodes fail without which all others reach each other."""
    troubles = {(a, b): to["trouble"] for a in ways for b, to in ways[a].items() if to["trouble"]}
    bad = fewest_to_leave_out(list(troubles), list(nodes))
    others = len({*ways, *(b for to in ways.values() for b in to)}) - 1
    for name in ways:
        lost = {b: why for (a, b), why in troubles.items() if a == name}
        lost |= {
            a: f"it says: {why}" for (a, b), why in troubles.items() if b == name and a not in lost
        }
        nodes[name].checks.append(_reach(name, lost, others, bad))


def _reach(name: str, lost: dict[str, str], others: int, bad: Sequence[str]) -> Check:
    """lost: nodes that this one does not reach, or that do not reach it, and why."""
    if not lost:
        return Check("reach", "ok", f"reaches {others} other nodes, and they this one")
    first = next(iter(lost))
    more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    message = f"{name} and {first}{more} cannot talk: {lost[first]}"
    if name not in bad:
        return Check("reach", "warn", message, f"nothing here: {first} is left out")
    if others == 1:
        cause = "one of the two is at fault; a third node would tell which"
        return Check(UNCLEAR, "fail", message, EXCLUDE_ONE, cause)
    cause = (
        "no way to any other node: the wrong interface, a firewall, or a broken cable or port"
        if len(lost) == others
        else f"it talks to {others - len(lost)} of {others} nodes: a rule against one address, or a"
        " broken link between the two"
    )
    return Check("reach", "fail", message, f"leave {name} out, or repair its network", cause)


def fewest_to_leave_out(pairs: Iterable[tuple[str, str]], order: Sequence[str]) -> tuple[str, ...]:
    """The fewest nodes without which no pair is left: a minimum vertex cover.

    pairs: (from, to) that fail. Of equal ones those go that themselves fail more, then later ones, so
    that the head stays.
    """
    pairs = list(pairs)
    edges = {frozenset(pair) for pair in pairs}
    failures = Counter(one for one, _ in pairs)
    for most in range(len(order) + 1):
        rank = {name: (failures[name], place) for place, name in enumerate(order)}
        found = _cover(edges, most, rank)
        if found is not None:
            return tuple(name for name in order if name in found)
    raise AssertionError("all nodes together cover every pair")


def _cover(
    edges: set[frozenset[str]], most: int, rank: dict[str, tuple[int, int]]
) -> set[str] | None:
    """At most `most` nodes that touch every edge; None where that cannot be.

    Either the busiest node is one of them, or all its neighbours are.
    """
    if not edges:
        return set()
    degree = Counter(name for edge in edges for name in edge)
    busiest = max(degree, key=lambda name: (degree[name], rank[name]))
    neighbours = {name for edge in edges if busiest in edge for name in edge} - {busiest}
    for taken in ({busiest}, neighbours):
        if len(taken) <= most:
            rest = {edge for edge in edges if not edge & taken}
            found = _cover(rest, most - len(taken), rank)
            if found is not None:
                return found | taken
    return None


def judge_clocks(nodes: Mapping[str, Node], ways: Ways, most_sec: float) -> None:
    """Add the check `clock`: how far each clock is from the median of what the others see."""
    for name in ways:
        seen = [to[name]["ahead_sec"] for to in ways.values() if name in to]
        seen = [sec for sec in seen if sec is not None]
        if not seen:
            continue
        ahead = statistics.median(seen)
        where = "ahead of" if ahead > 0 else "behind"
        message = f"{abs(ahead):.3f} s {where} the other nodes"
        nodes[name].checks.append(
            Check("clock", "ok", message)
            if abs(ahead) <= most_sec
            else Check("clock", "warn", message, f"start chrony or ntpd on {name}")
        )


# --- nodes compared -------------------------------------------------------------------------------


def compare(nodes: Sequence[Node], machine: Machine) -> None:
    """Add what shows only beside other nodes: other versions, InfiniBand or GPUs that are missing."""
    answered = [node for node in nodes if node.facts]
    if len(answered) < 2:
        return
    for node in answered:
        node.checks.append(_same_versions(node, answered))
        node.checks += _same_hardware(node, answered, machine)


def _same_versions(node: Node, nodes: Sequence[Node]) -> Check:
    """Whether Python, packages and our code are those of most nodes (of the first where it is a tie)."""
    mine: dict[str, str] = node.facts["versions"]
    other = []
    for name, number in mine.items():
        counts = Counter(each.facts["versions"][name] for each in nodes)
        usual, times = counts.most_common(1)[0]
        if number != usual:
            other.append(f"{name} {number or 'missing'} here, {usual} on {times} nodes")
    if not other:
        return Check("versions", "ok", f"as on the other {len(nodes) - 1} nodes")
    return Check(
        "versions",
        "fail",
        "; ".join(other),
        "use one environment and one checkout on all nodes",
        cause=f"{node.name} sees another disk, or an old copy of it",
    )


def _same_hardware(node: Node, nodes: Sequence[Node], machine: Machine) -> list[Check]:
    checks = []
    with_ib = sum(each.facts["infiniband"] for each in nodes)
    if with_ib and not node.facts["infiniband"]:
        checks.append(
            Check(
                "infiniband",
                "warn" if machine.fabric.backend == "gloo" else "fail",
                f"no InfiniBand interface with an address is up; {with_ib} other nodes have one",
                f"leave {node.name} out, or see ibstat there",
                cause="its port is down; NCCL would wait for ever for a way that both ends have",
            )
        )
    most = max(each.facts["gpus"] for each in nodes)
    if node.facts["gpus"] < most and machine.fabric.backend != "gloo":
        checks.append(
            Check(
                "gpus",
                "fail",
                f"{node.facts['gpus']} GPUs, other nodes have {most}",
                f"leave {node.name} out, or see nvidia-smi there",
                cause="a GPU has fallen off the bus, or the partition mixes kinds of nodes",
            )
        )
    return checks


# --- who is to blame ------------------------------------------------------------------------------


def bad_nodes(nodes: Sequence[Node]) -> dict[str, str]:
    """Nodes to keep away from at the next submission, and why: what fails everywhere is not theirs."""
    everywhere = set.intersection(*({check.name for check in node.failed} for node in nodes))
    found = {}
    for node in nodes:
        own = [c for c in node.failed if c.name in OWN or c.name not in {*everywhere, UNCLEAR}]
        if own:
            found[node.name] = "; ".join(f"{check.name}: {check.message}" for check in own)
    return found
