"""Which nodes are left out: those with the most failing pairs, not one that is only the peer of a
faulty node."""

import contextlib
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.core.machine import load_machine
from forge.core.records import Check
from forge.hosts import rendezvous
from forge.hosts.nodes import NodeFailure
from forge.hosts.placement import Placement
from forge.preflight import compare_nodes, packages
from forge.preflight.compare_nodes import (
    CheckedNode,
    _master,
    bad_nodes,
    check_clocks,
    check_links,
    compare,
    nodes_to_leave_out,
)
from forge.preflight.node_checks import ComparedFacts, Link, PreflightAnswer, Wanted
from forge.slurm import slurm
from forge.slurm.slurm import Job

NAMES = [f"n{number}" for number in range(6)]
VERSIONS = {"python": "3.11.7", "torch": "2.13.0", "forge code": "abc"}
FAIL = Check("disk", "fail", "0.1 GiB free", "free space")


ALIKE = ComparedFacts(
    **{"versions": VERSIONS, "address": "10.0.0.1", "master_trouble": "", "infiniband": False},
    **{"ports": {}, "gpus": 0, "driver": "", "exported": {}, "bytes_per_sec": None, "boot": "b"},
)


def node(name="n0", *checks, **facts):
    return CheckedNode(name, list(checks), replace(ALIKE, **facts))


def last(node):
    return node.checks[-1]


# --- lines ----------------------------------------------------------------------------------------


def test_line_of_a_healthy_node():
    found = node("n7", *(Check(n, "ok", "") for n in ("project", "packages", "data", "disk")))
    assert found.line == "NODE n7 OK PY 3.11.7 torch 2.13.0 proj=ok pkgs=ok data=ok disk=ok"


def test_line_of_an_unhealthy_node_says_which_part_failed():
    checks = [
        Check("project", "ok", ""),
        Check("packages", "fail", "package torch is missing", "run: make setup"),
        Check("data", "warn", ""),
    ]
    found = node("n7", *checks, versions={"python": "3.11.9", "torch": ""})
    assert found.line == "NODE n7 FAIL PY 3.11.9 proj=ok pkgs=fail data=warn"
    assert found.reason == "packages: package torch is missing"


def test_line_of_a_node_without_an_answer():
    found = CheckedNode("n7", [Check("answers", "fail", "its process ended")])
    assert found.line == "NODE n7 FAIL answers=fail"


# --- where ranks meet -----------------------------------------------------------------------------


class Pool:
    """Nodes, each with what it says whether it resolves a name or address."""

    def __init__(self, **nodes):
        self.nodes = nodes

    def ask(self, request, *, name, timeout_sec):
        assert (request, timeout_sec) == (rendezvous.resolves, 5)
        silent = NodeFailure("no answer")
        return {node: known.get(name, silent) for node, known in self.nodes.items()}


def test_ranks_meet_at_the_address_of_a_node_whose_name_does_not_resolve(monkeypatch):
    monkeypatch.setattr(slurm, "node_address", lambda name: {"n0": "10.78.0.11"}[name])
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    machine, blind = load_machine(None), {"n0": False, "10.78.0.11": True}
    assert _master(Pool(n0={"n0": True}, n1=blind), machine, "n0", sec=5) == "10.78.0.11"
    # A node that does not answer says nothing of the name.
    assert _master(Pool(n0={"n0": True}, n1={}), machine, "n0", sec=5) == "n0"
    asked_for = load_machine(None, {"fabric.master_addr": "n0"})
    assert _master(Pool(n0={"n0": True}, n1=blind), asked_for, "n0", sec=5) == "n0"


# --- connections ----------------------------------------------------------------------------------


pairs = st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)), max_size=9).map(
    lambda found: [pair for pair in found if pair[0] != pair[1]]
)


@given(pairs, st.randoms())
def test_no_failing_pair_is_left_whatever_the_order_of_the_pairs(failing, random):
    gone = nodes_to_leave_out(failing, NAMES)
    assert all(set(pair) & set(gone) for pair in failing)
    assert set(gone) <= {name for pair in failing for name in pair}
    random.shuffle(failing)
    assert nodes_to_leave_out(failing, NAMES) == gone


@given(st.sampled_from(NAMES), st.lists(st.booleans(), min_size=len(NAMES), max_size=len(NAMES)))
def test_a_single_bad_node_is_left_out_alone(bad, outward):
    pairs = [
        (bad, other) if out else (other, bad)
        for other, out in zip(NAMES, outward, strict=True)
        if other != bad
    ]
    assert nodes_to_leave_out(pairs, NAMES) == (bad,)


def test_the_node_with_the_most_failing_pairs_goes_first():
    star, apart = [("n0", other) for other in ("n1", "n2", "n3")], [("n3", "n4")]
    assert nodes_to_leave_out([*star, *apart], NAMES) == ("n0", "n3")


def test_of_two_nodes_the_one_that_cannot_connect_is_left_out_and_else_the_later():
    assert nodes_to_leave_out([("n1", "n2")], NAMES) == ("n1",)
    assert nodes_to_leave_out([("n1", "n2"), ("n2", "n1")], NAMES) == ("n2",)


def links(names, *lost):
    """The answer of each node about each other one; lost: (from, to) that fail."""
    return {
        a: {b: Link("cannot connect" if (a, b) in lost else "", 0.0) for b in names if b != a}
        for a in names
    }


def both(a, b):
    return (a, b), (b, a)


def judged(names, *lost):
    nodes = {name: node(name) for name in names}
    check_links(nodes, links(names, *lost))
    return nodes


def test_nodes_that_all_reach_each_other_pass():
    nodes = judged(NAMES[:3])
    assert {last(n).status for n in nodes.values()} == {"ok"}
    assert last(nodes["n0"]).message == "connected with 2 other nodes, both ways"


def test_node_that_no_other_reaches_fails_and_the_others_only_warn():
    nodes = judged(NAMES[:3], *both("n0", "n1"), *both("n0", "n2"))
    assert {name: last(n).status for name, n in nodes.items()} == {
        "n0": "fail",
        "n1": "warn",
        "n2": "warn",
    }
    assert "no connection to any other node" in last(nodes["n0"]).cause
    assert list(bad_nodes(list(nodes.values()))) == ["n0"]


def test_one_node_of_a_broken_pair_is_left_out():
    nodes = judged(NAMES[:4], *both("n1", "n2"))
    assert [name for name, n in nodes.items() if not n.is_healthy] == ["n2"]
    assert "n2 and n1 cannot talk: cannot connect" in last(nodes["n2"]).message
    assert "it talks to 2 of 3 nodes" in last(nodes["n2"]).cause
    assert list(bad_nodes(list(nodes.values()))) == ["n2"]


def test_of_two_nodes_alone_neither_is_excluded():
    nodes = judged(["n0", "n1"], *both("n0", "n1"))
    assert [name for name, n in nodes.items() if not n.is_healthy] == ["n1"]
    assert "a third node would tell which" in last(nodes["n1"]).cause
    assert bad_nodes(list(nodes.values())) == {}


@pytest.mark.parametrize(("ahead", "word"), [(8.0, "ahead of"), (-8.0, "behind")])
def test_clock_that_differs_from_the_others_only_warns(ahead, word):
    nodes = {name: node(name) for name in NAMES[:4]}
    seen = links(NAMES[:4])
    for name in seen:
        for other in seen[name]:
            seen[name][other] = Link("", ahead * ((other == "n3") - (name == "n3")))
    check_clocks(nodes, seen, 5)
    assert [last(n).status for n in nodes.values()] == ["ok", "ok", "ok", "warn"]
    assert last(nodes["n3"]).message == f"8.000 s {word} the other nodes"


# --- nodes compared -------------------------------------------------------------------------------


def compared(*nodes, ranks=4, **keys):
    compare(nodes, load_machine(None, keys), ranks)
    return [[check.name for check in node.failed] for node in nodes]


def test_variable_and_driver_that_differ_are_a_warning_with_both_values():
    odd = node("n2", exported={"NCCL_DEBUG": "INFO"}, driver="550.1")
    alike = [node("n0", driver="560.2"), node("n1", driver="560.2"), node("n3")]  # n3 has no GPU
    assert compared(*alike, odd) == [[], [], [], []]  # a warning excludes no node
    said = {check.name: check.message for check in odd.checks if check.status == "warn"}
    assert said == {
        "environment": "NCCL_DEBUG is INFO here, not set on 3 nodes",
        "driver": "NVIDIA driver 550.1, 560.2 on 2 nodes",
    }
    assert [check.name for each in alike for check in each.checks if check.status == "warn"] == []


def test_node_with_other_versions_than_most_is_unfit():
    odd = node("n2", versions={**VERSIONS, "torch": "2.12.0", "forge code": "abd"})
    assert compared(node("n0"), node("n1"), odd) == [[], [], ["versions"]]
    assert last(odd).message == (
        "torch 2.12.0 here, 2.13.0 on 2 nodes; forge code abd here, abc on 2 nodes"
    )


@pytest.mark.parametrize(
    ("fact", "name"), [({"infiniband": True}, "infiniband"), ({"gpus": 4}, "gpus")]
)
def test_hardware_that_only_one_node_misses_makes_it_unfit(fact, name):
    nodes = node("n0", **fact), node("n1", **fact), node("n2")
    assert compared(*nodes, **{"fabric.backend": "nccl"}) == [[], [], [name]]
    nodes = node("n0", **fact), node("n1", **fact), node("n2")
    assert compared(*nodes, **{"fabric.backend": "gloo", "device": "cpu"}) == [[], [], []]


@pytest.mark.parametrize(
    ("machine", "gpus", "status"),
    [
        ({}, 4, "fail"),
        ({"fabric.infiniband": "never"}, 4, None),
        ({"fabric.infiniband": "never", "fabric.backend": "nccl"}, 4, None),
        ({"fabric.backend": "gloo"}, 4, "warn"),
        ({"device": "cpu"}, 4, "warn"),
        ({}, 0, "warn"),  # Gloo, since no node has a GPU
    ],
)
def test_node_without_infiniband_is_unfit_only_where_nccl_would_use_it(machine, gpus, status):
    nodes = [node("n0", gpus=gpus, infiniband=True), node("n1", gpus=gpus)]
    compare(nodes, load_machine(None, machine), 1)
    found = [check.status for check in nodes[1].checks if check.name == "infiniband"]
    assert found == ([status] if status else [])


def test_node_with_fewer_gpus_than_others_is_healthy_where_its_ranks_have_one_each():
    """A partition may mix nodes of four and of eight GPUs."""
    nodes = node("n0", gpus=8), node("n1", gpus=4)
    assert compared(*nodes, ranks=4) == [[], []]
    assert (
        last(nodes[1]).status == "warn" and "4 GPUs, other nodes have 8" in last(nodes[1]).message
    )
    assert compared(node("n0", gpus=8), node("n1", gpus=7), ranks=8) == [[], ["gpus"]]


# --- nodes to exclude -----------------------------------------------------------------------------


def test_node_is_not_excluded_for_what_fails_on_every_node():
    assert bad_nodes([node("n0", FAIL), node("n1", FAIL)]) == {}
    assert bad_nodes([node("n0", FAIL), node("n1")]) == {"n0": "disk: 0.1 GiB free"}
    assert bad_nodes([node("n0", FAIL)]) == {}


def test_node_is_excluded_for_its_full_local_disk_even_where_all_nodes_have_one():
    full = Check("local disk", "fail", "No space left")
    assert list(bad_nodes([node("n0", full), node("n1", full)])) == ["n0", "n1"]


# --- ports of InfiniBand --------------------------------------------------------------------------

NDR, HDR = "400 Gb/sec (4X NDR)", "200 Gb/sec (2X NDR)"
ALL_PORTS = {"mlx5_0 port 1": NDR, "mlx5_1 port 1": NDR}


@pytest.mark.parametrize(
    ("ports", "message"),
    [
        ({"mlx5_0 port 1": NDR}, f"mlx5_1 port 1 is not active, {NDR} on 2 nodes"),
        (ALL_PORTS | {"mlx5_1 port 1": HDR}, f"mlx5_1 port 1 has {HDR}, {NDR} on 2 nodes"),
    ],
)
def test_a_port_that_is_down_or_slower_than_on_most_nodes_is_named(ports, message):
    nodes = [node(name, infiniband=True, ports=ALL_PORTS) for name in NAMES[:2]]
    nodes.append(node("n2", infiniband=True, ports=ports))
    compare(nodes, load_machine(None), 1)
    [check] = [check for check in nodes[2].checks if check.name == "ports"]
    assert (check.status, check.message) == ("warn", message)
    assert not [check for each in nodes[:2] for check in each.checks if check.name == "ports"]


def test_more_ports_than_most_nodes_and_two_nodes_that_differ_are_no_trouble():
    few = {"mlx5_0 port 1": NDR}
    for kinds in ([few, few, ALL_PORTS], [few, ALL_PORTS]):
        nodes = [node(infiniband=True, ports=ports) for ports in kinds]
        compare(nodes, load_machine(None), 1)
        assert not [check for each in nodes for check in each.checks if check.name == "ports"]


# --- the import of torch --------------------------------------------------------------------------


def test_nodes_of_a_job_import_torch_before_the_clock_of_their_ranks(monkeypatch):
    """A healthy node whose disk was cold was called unhealthy, after hours in the queue."""
    job = Job("7", "RUNNING", 0, ("n1", "n2"), 1, "main", "x", True, None)
    slow = Check("torch", "fail", "importing torch takes longer than 300 s")
    asked = {}

    class Pool:
        def ask(self, request, *, hosts, timeout_sec):
            asked[request] = (hosts, timeout_sec)
            return {"n1": slow, "n2": NodeFailure("no answer")}

    two = [node("n1"), node("n2")]
    compare_nodes._import_torch(Pool(), two)
    assert asked == {packages.import_torch: (["n1", "n2"], 304.0)}
    assert [last(each).message for each in two] == [slow.message, "no answer"]
    monkeypatch.setattr(packages, "import_torch", lambda: slow)
    monkeypatch.setattr(compare_nodes, "check_node", lambda wanted: PreflightAnswer([], ALIKE))
    here, machine = Placement.here(), load_machine(None)
    inspected = partial(compare_nodes.inspect, machine=machine, sec=1, python="python")
    [alone] = inspected(replace(here, job=job), {here.hosts[0]: None})
    assert alone.checks == [slow]
    [local] = inspected(here, {here.hosts[0]: None})
    assert local.checks == []


@pytest.mark.parametrize(("names", "failed"), [(("n1",), []), (("n1", "n2"), ["reach"])])
def test_only_node_of_a_job_elsewhere_has_nobody_to_connect_to(monkeypatch, names, failed):
    class Pool:
        def ask(self, request, *, hosts=names, **_):
            answers = {compare_nodes.check_node: PreflightAnswer([], ALIKE)}
            return {host: answers.get(request, NodeFailure("no address")) for host in hosts}

    monkeypatch.setattr(compare_nodes, "NodePool", lambda *_, **__: contextlib.nullcontext(Pool()))
    monkeypatch.setattr(compare_nodes, "_master", lambda *_, **__: "")
    machine = load_machine(None)
    wanted = dict.fromkeys(names, Wanted("", "", "", "", machine, 1, None, "", {}, None))
    found = compare_nodes.inspect(Placement(names), wanted, machine, sec=1, python="python")
    assert [[check.name for check in each.failed] for each in found] == [failed] * len(names)


@pytest.mark.parametrize("warm", [[], ["n1"], ["n1", "n2"]])
def test_agents_are_asked_to_import_torch_where_it_is_not_known_to_be_in_memory(monkeypatch, warm):
    """`inspect` itself, with agents that answer at once."""
    asked = []

    class Pool(contextlib.nullcontext):
        def __init__(self, *_, **__):
            super().__init__(self)

        def ask(self, request, *, hosts=("n1", "n2"), **_):
            if request is packages.import_torch:
                asked.extend(hosts)
            answers = {compare_nodes.check_node: PreflightAnswer([], ALIKE)}
            answers[packages.import_torch] = Check("torch", "ok", "imported in 1.0 s")
            return {host: answers.get(request, NodeFailure("not now")) for host in hosts}

    monkeypatch.setattr(compare_nodes, "NodePool", Pool)
    monkeypatch.setattr(compare_nodes, "_master", lambda *_, **__: "n1")
    job = Job("7", "RUNNING", 0, ("n1", "n2"), 1, "main", "x", True, None)
    machine = load_machine(None)
    wish = Wanted("", "", "", "", machine, 1, None, "n1", {}, None)
    wanted = dict.fromkeys(("n1", "n2"), wish)
    two = Placement(("n1", "n2"), job)
    found = compare_nodes.inspect(
        two, wanted, machine, sec=1, python="python", is_warm=lambda host, facts: host in warm
    )
    assert asked == [host for host in ("n1", "n2") if host not in warm]
    for each in found:
        assert ("imported in 1.0 s" in [c.message for c in each.checks]) == (each.name in asked)
