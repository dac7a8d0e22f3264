"""Check all nodes of an allocation, and compare them: versions, hardware, clocks, connections."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from forge.core import records
from forge.core.machine import Machine
from forge.core.records import Check
from forge.hosts import rendezvous
from forge.hosts.nodes import NodeFailure, NodePool
from forge.hosts.placement import Placement
from forge.preflight import gpu_checks, packages
from forge.preflight.container_checks import container_checks
from forge.preflight.node_checks import (
    ComparedFacts,
    Link,
    PreflightAnswer,
    Wanted,
    check_node,
    listen,
    reach,
    reach_sec,
)
from forge.preflight.packages import Imported

T = TypeVar("T")
IsWarm = Callable[[str, ComparedFacts], bool]

# TCP sends a lost SYN again after 1 s, and again 2 s later.
CONNECT_SEC = 4.0

# Checks that are about the node even where they fail on every node of the allocation. Any other check
# that fails on all nodes is a mistake in the settings, such as data that was never made.
OWN = ("local disk", "memory", "gpus", *gpu_checks.ABOUT_THE_NODE)
# One of two nodes is at fault, and nothing tells which: neither is excluded.
UNCLEAR = "one of two"
EXCLUDE_ONE = "exclude one of the two (slurm.exclude), or set preflight.spare_nodes: 1"


@dataclass
class CheckedNode:
    """One node: its checks, and the facts that are compared between nodes."""

    name: str
    checks: list[Check]
    facts: ComparedFacts | None = None  # None where the node did not answer

    @property
    def failed(self) -> list[Check]:
        return records.failed_checks(self.checks)

    @property
    def is_healthy(self) -> bool:
        return not self.failed

    @property
    def reason(self) -> str:
        """Why the node is unhealthy, in one line."""
        return records.summary_of_checks(self.failed)

    @property
    def line(self) -> str:
        """One line for the node: `NODE n7 OK PY 3.11.7 torch 2.13.0 proj=ok …`."""
        versions = self.facts.versions if self.facts else {}
        parts = [f"NODE {self.name} {'OK' if self.is_healthy else 'FAIL'}"]
        parts += [f"PY {versions['python']}"] if versions else []
        parts += [f"torch {versions['torch']}"] if versions.get("torch") else []
        shown = {
            **{"project": "proj", "packages": "pkgs", "data": "data", "disk": "disk"},
            **{"imports": "imports", "reach": "net", "answers": "answers"},
        }
        by_name = {check.name: check.status for check in self.checks}
        parts += [f"{short}={by_name[name]}" for name, short in shown.items() if name in by_name]
        return " ".join(parts)


def nothing_is_warm(host: str, facts: ComparedFacts) -> bool:
    """For nodes of which nothing is known."""
    return False


def inspect(
    placement: Placement,
    wanted: Mapping[str, Wanted],
    machine: Machine,
    *,
    sec: float,
    python: str,
    is_warm: IsWarm = nothing_is_warm,
) -> list[CheckedNode]:
    """All nodes with their checks, in the order of `placement.hosts`, within about `sec` seconds; in a
    job, TORCH_SEC more for the import of torch.

    python: the interpreter that runs Forge on the other nodes. is_warm: whether the page cache of a node
    is known to hold torch, so that it need not import it. Raises EndpointError where the ranks would
    look for rank 0 on another node.
    """
    started = container_checks(placement)
    broken = {h: CheckedNode(h, [check]) for h, check in started.items() if check.status == "fail"}
    rest = placement.without(broken)
    nodes = (
        _inside(rest, wanted, machine, sec=sec, python=python, is_warm=is_warm)
        if rest.hosts
        else []
    )
    for node in nodes:
        node.checks[:0] = [started[node.name]] if node.name in started else []
    by_name = {node.name: node for node in nodes} | broken
    return [by_name[host] for host in placement.hosts]


def _inside(
    placement: Placement,
    wanted: Mapping[str, Wanted],
    machine: Machine,
    *,
    sec: float,
    python: str,
    is_warm: IsWarm,
) -> list[CheckedNode]:
    """Inspect as `inspect` does, for nodes on which the container starts, or without one."""
    head = placement.hosts[0]
    imports = _wanted_imports(wanted, machine, sec / 2)
    if placement.is_here and placement.container is None:
        node = _answered(head, check_node(wanted[head]))
        if imports:
            node.checks.append(packages.import_packages(**imports[head]).check)
        if placement.job and not (node.facts and is_warm(head, node.facts)):
            node.checks.append(packages.import_torch())
        return [node]
    with NodePool(placement, python=python, start_sec=sec / 2) as pool:
        master = _master(pool, machine, wanted[head].master, sec=sec / 4)
        each = {h: {"wanted": replace(wish, master=master)} for h, wish in wanted.items()}
        answers = pool.ask(check_node, each=each, timeout_sec=sec / 4)
        nodes = {host: _answered(host, answer) for host, answer in answers.items()}
        answered = [node for node in nodes.values() if node.facts]
        if imports:
            hosts = [node.name for node in answered]
            imported = pool.ask(
                packages.import_packages, each=imports, hosts=hosts, timeout_sec=sec
            )
            for node in answered:
                _add_imports(node, imported[node.name])
        if of_head := nodes[head].facts:
            rendezvous.refuse(machine.fabric, head, of_head.master_trouble)
        links: Links = {}
        if len(placement.hosts) > 1:
            links = _connect_all(pool, answered, machine, head=head, master=master, sec=sec / 4)
        if placement.job:
            cold = [node for node in answered if node.facts and not is_warm(node.name, node.facts)]
            _import_torch(pool, cold)
    compare(list(nodes.values()), machine, wanted[head].ranks_per_node)
    check_links(nodes, links)
    check_clocks(nodes, links, machine.preflight.max_clock_skew_sec)
    return list(nodes.values())


def _master(pool: NodePool, machine: Machine, wanted: str, *, sec: float) -> str:
    """Name or address at which the ranks meet. wanted: the address that was asked for, else the name of
    their first node, which some of the nodes may not resolve."""

    def unresolved(name: str) -> list[str]:
        answers = pool.ask(rendezvous.resolves, name=name, timeout_sec=sec)
        return [host for host, answer in answers.items() if answer is False]

    is_asked_for = rendezvous.host(machine.fabric, "")
    return wanted if is_asked_for or not wanted else rendezvous.name_or_address(wanted, unresolved)


def _wanted_imports(
    wanted: Mapping[str, Wanted], machine: Machine, sec: float
) -> dict[str, dict[str, Any]]:
    """Arguments of `import_packages` by host; {} where nothing is to be imported."""
    names = machine.preflight.packages
    if not names:
        return {}
    return {
        host: {
            "names": names,
            "command": wish.program.command if wish.program else "",
            "cwd": wish.program.staged.cwd if wish.program else ".",
            "sec": sec,
        }
        for host, wish in wanted.items()
    }


def _add_imports(node: CheckedNode, answer: Imported | NodeFailure) -> None:
    assert node.facts
    if isinstance(answer, NodeFailure):
        check = Check("imports", "fail", answer.message, answer.fix, answer.cause)
        node.checks.append(check)
    else:
        node.checks.append(answer.check)
        node.facts = replace(node.facts, versions=node.facts.versions | answer.versions)


def _import_torch(pool: NodePool, nodes: Sequence[CheckedNode]) -> None:
    """Have these nodes import torch at once, before the clock of their ranks runs. Only in a job: there
    the environment is often on a network disk, and a node that is wrongly left out costs the queue
    again."""
    if not nodes:
        return
    sec = packages.TORCH_SEC + CONNECT_SEC
    hosts = [node.name for node in nodes]
    answers = pool.ask(packages.import_torch, hosts=hosts, timeout_sec=sec)
    for node in nodes:
        answer = answers[node.name]
        if isinstance(answer, NodeFailure):
            answer = Check("torch", "fail", answer.message, answer.fix, answer.cause)
        node.checks.append(answer)


def _answered(host: str, answer: PreflightAnswer | NodeFailure) -> CheckedNode:
    if isinstance(answer, NodeFailure):
        trouble = Check("answers", "fail", answer.message, answer.fix, answer.cause)
        return CheckedNode(host, [trouble])
    return CheckedNode(host, list(answer.checks), answer.facts)


# --- connections between all nodes ----------------------------------------------------------------

Links = dict[str, dict[str, Link]]  # from, to


def _connect_all(
    pool: NodePool,
    nodes: Sequence[CheckedNode],
    machine: Machine,
    *,
    head: str,
    master: str,
    sec: float,
) -> Links:
    """Have every node connect to every other node. A node that cannot take part gets a failed check."""
    by_name = {node.name: node for node in nodes}
    listening = pool.ask(
        listen, hosts=by_name, timeout_sec=sec, again=False, machine=machine, master=master
    )
    listeners = _without_failed(listening, by_name)
    if len(listeners) < 2:
        return {}
    links = pool.ask(
        reach,
        hosts=listeners,
        timeout_sec=sec + reach_sec(len(listeners), CONNECT_SEC),
        listeners=listeners,
        head=head,
        master=master,
        patience_sec=CONNECT_SEC,
    )
    return _without_failed(links, by_name)


def _without_failed(
    answers: dict[str, T | NodeFailure], nodes: dict[str, CheckedNode]
) -> dict[str, T]:
    """The answers of nodes that have one; the others get a failed check."""
    for host, answer in answers.items():
        if isinstance(answer, NodeFailure):
            fix = answer.fix or f"leave {host} out, or check its network"
            nodes[host].checks.append(Check("reach", "fail", answer.message, fix, answer.cause))
    return {host: a for host, a in answers.items() if not isinstance(a, NodeFailure)}


def check_links(nodes: Mapping[str, CheckedNode], links: Links) -> None:
    """Add the check `reach`: nodes fail without which all others reach each other."""
    troubles = {(a, b): link.trouble for a in links for b, link in links[a].items() if link.trouble}
    bad = nodes_to_leave_out(list(troubles), list(nodes))
    others = len({*links, *(b for to in links.values() for b in to)}) - 1
    for name in links:
        lost = {b: why for (a, b), why in troubles.items() if a == name}
        lost |= {
            a: f"{a} says: {why}" for (a, b), why in troubles.items() if b == name and a not in lost
        }
        nodes[name].checks.append(_reach(name, lost, others, bad))


def _reach(name: str, lost: dict[str, str], others: int, bad: Sequence[str]) -> Check:
    """lost: nodes that the node `name` does not reach, or that do not reach it, and why."""
    if not lost:
        return Check("reach", "ok", f"connected with {others} other nodes, both ways")
    first = next(iter(lost))
    more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    message = f"{name} and {first}{more} cannot talk: {lost[first]}"
    if name not in bad:
        return Check("reach", "warn", message, f"nothing to do here: {first} is left out")
    if others == 1:
        cause = "one of the two is at fault; a third node would tell which"
        return Check(UNCLEAR, "fail", message, EXCLUDE_ONE, cause)
    cause = (
        "no connection to any other node: the wrong interface, a firewall, or a broken cable or port"
        if len(lost) == others
        else f"it talks to {others - len(lost)} of {others} nodes: a rule against one address, or a"
        " broken link between the two"
    )
    return Check("reach", "fail", message, f"leave {name} out, or repair its network", cause)


def nodes_to_leave_out(pairs: Iterable[tuple[str, str]], order: Sequence[str]) -> tuple[str, ...]:
    """Nodes without which no failing pair is left: again and again the node that fails with the most of
    the nodes that are left. A single node that fails with all others is left out alone.

    pairs: (from, to) that fail. In a tie the node that fails more often as `from`, then the later one in
    `order`, so that the head node stays. Not always the fewest nodes.
    """
    pairs = list(pairs)
    failures = Counter(node for node, _ in pairs)
    rank = {name: (failures[name], place) for place, name in enumerate(order)}
    edges, gone = {frozenset(pair) for pair in pairs}, set()
    while edges:
        degree = Counter(name for edge in edges for name in edge)
        worst = max(degree, key=lambda name: (degree[name], rank[name]))
        gone.add(worst)
        edges = {edge for edge in edges if worst not in edge}
    return tuple(name for name in order if name in gone)


def check_clocks(nodes: Mapping[str, CheckedNode], links: Links, most_sec: float) -> None:
    """Add the check `clock`: the median over the other nodes of how far this clock is ahead of theirs."""
    for name in links:
        seen = [
            sec for to in links.values() if name in to and (sec := to[name].ahead_sec) is not None
        ]
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


def compare(nodes: Sequence[CheckedNode], machine: Machine, ranks: int) -> None:
    """Add the checks that need other nodes to compare with: versions, InfiniBand, number of GPUs. ranks:
    of a node, each of which needs a GPU."""
    everyone = [node.facts for node in nodes if node.facts]
    if len(everyone) < 2:
        return
    for node in nodes:
        if node.facts:
            node.checks.append(_same_versions(node.name, node.facts, everyone))
            node.checks += _same_environment(node.name, node.facts, everyone)
            node.checks += _same_hardware(node.name, node.facts, everyone, machine, ranks)


def _same_versions(node: str, facts: ComparedFacts, everyone: Sequence[ComparedFacts]) -> Check:
    """Check that Python, packages and Forge's code are those of most nodes (in a tie, of the first)."""
    other = []
    for name, number in facts.versions.items():
        counts = Counter(each.versions.get(name, "") for each in everyone)
        usual, times = counts.most_common(1)[0]
        if number != usual:
            other.append(f"{name} {number or 'missing'} here, {usual} on {times} nodes")
    if not other:
        return Check("versions", "ok", f"as on the other {len(everyone) - 1} nodes")
    return Check(
        "versions",
        "fail",
        "; ".join(other),
        "use one environment and one checkout on all nodes",
        cause=f"{node} sees another disk, or an old copy of it",
    )


def _same_environment(
    node: str, facts: ComparedFacts, everyone: Sequence[ComparedFacts]
) -> Iterator[Check]:
    """Warnings where variables of NCCL, Gloo and torch, or the driver, are not those of most nodes."""
    other = []
    for name in sorted({name for each in everyone for name in each.exported}):
        counts = Counter(each.exported.get(name, "not set") for each in everyone)
        usual, times = counts.most_common(1)[0]
        if (here := facts.exported.get(name, "not set")) != usual:
            other.append(f"{name} is {here} here, {usual} on {times} nodes")
    if other:
        fix = "unset it, or export it in the shell of the submission, which all nodes inherit"
        cause = "set by a file that only this node reads, such as /etc/profile.d or a module"
        yield Check("environment", "warn", "; ".join(other), fix, cause)
    drivers = Counter(each.driver for each in everyone if each.driver)
    [(usual, times)] = drivers.most_common(1) or [("", 0)]
    if facts.driver not in ("", usual):
        message = f"NVIDIA driver {facts.driver}, {usual} on {times} nodes"
        yield Check("driver", "warn", message, f"leave {node} out, if NCCL fails")


def _same_hardware(
    node: str,
    facts: ComparedFacts,
    everyone: Sequence[ComparedFacts],
    machine: Machine,
    ranks: int,
) -> Iterator[Check]:
    most = max(each.gpus for each in everyone)
    if machine.fabric.infiniband != "never":
        yield from _same_fabric(node, facts, everyone, machine.uses_nccl(most))
    if facts.gpus < most and machine.device != "cpu":
        yield Check(
            "gpus",
            "fail" if facts.gpus < ranks else "warn",
            f"{facts.gpus} GPUs, other nodes have {most}",
            f"leave {node} out, or see nvidia-smi there",
            cause="a GPU has fallen off the bus, or the partition mixes kinds of nodes",
        )


def _same_fabric(
    node: str, facts: ComparedFacts, everyone: Sequence[ComparedFacts], uses_nccl: bool
) -> Iterator[Check]:
    with_ib = sum(each.infiniband for each in everyone)
    if facts.infiniband:
        yield from _same_ports(node, facts, everyone)
    elif with_ib:
        yield Check(
            "infiniband",
            "fail" if uses_nccl else "warn",
            f"no port of InfiniBand or RoCE is active; {with_ib} other nodes have one",
            f"leave {node} out, or see ibstat there",
            cause="its port is down; NCCL would wait forever for a network that both ends have",
        )


def _same_ports(
    node: str, facts: ComparedFacts, everyone: Sequence[ComparedFacts]
) -> Iterator[Check]:
    """A warning where the active ports together have a lower rate than on most nodes."""
    kinds = Counter(tuple(sorted(each.ports.items())) for each in everyone)
    usual, times = dict(kinds.most_common(1)[0][0]), kinds.most_common(1)[0][1]
    if _gb_per_sec(facts.ports) >= _gb_per_sec(usual) or times == 1:
        return
    changed = [
        f"{port} {'has ' + facts.ports[port] if port in facts.ports else 'is not active'}, {rate}"
        for port, rate in usual.items()
        if facts.ports.get(port) != rate
    ]
    message = f"{'; '.join(changed)} on {times} nodes"
    cause = (
        "a cable or a port has failed, or runs at a lower rate: all ranks would wait for this node"
    )
    yield Check("ports", "warn", message, f"leave {node} out, or see ibstat there", cause)


def _gb_per_sec(ports: Mapping[str, str]) -> float:
    """GB/s of all ports together, from rates such as `400 Gb/sec (4X NDR)`."""
    rates = [re.match(r"[\d.]+", rate) for rate in ports.values()]
    return sum(float(rate[0]) for rate in rates if rate)


# --- nodes to exclude -----------------------------------------------------------------------------


def bad_nodes(nodes: Sequence[CheckedNode]) -> dict[str, str]:
    """Nodes to exclude from the next submission, and why. A check that fails on every node does not
    count, except those in OWN."""
    everywhere = set.intersection(*({check.name for check in node.failed} for node in nodes))
    reasons = {}
    for node in nodes:
        own = [c for c in node.failed if c.name in OWN or c.name not in {*everywhere, UNCLEAR}]
        if own:
            reasons[node.name] = records.summary_of_checks(own)
    return reasons
