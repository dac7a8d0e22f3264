"""Results of the ranks' probes must give the right checks, and name slow nodes with numbers."""

import statistics
from dataclasses import replace

import pytest

from forge.core.machine import load_machine
from forge.core.records import Check
from forge.hosts.placement import WorldLayout
from forge.launch.rank_records import ProbedRank, ProbeResult, RankRecord
from forge.preflight.isolate import last_error
from forge.preflight.rank_checks import rank_checks
from forge.preflight.rank_probe import PAIR_ROUNDS, network_chosen, tournament


def rank(number, host="n1", **changes):
    quiet = ProbedRank(number, 0, host, "cpu", {"torch": "2"}, False, "", 0.05, [])
    return replace(quiet, **changes)


def checks(ranks=None, nodes=1, **changes):
    ranks = ranks or [rank(0), rank(1)]
    result = replace(ProbeResult(ranks, "gloo", "eth7", True, 40.2, 3.456), **changes)
    layout = WorldLayout(nodes, len(ranks) // nodes)
    found = rank_checks(RankRecord("completed", result=result), layout, load_machine(None))
    return {check.name: check for check in found}


def problems(found):
    return {check.name: check for check in found.values() if check.status != "ok"}


def test_ranks_that_agree_pass():
    found = checks()
    assert problems(found) == {}
    assert found["mapping"].message == "world of 2: 0=n1:cpu, 1=n1:cpu"
    assert found["rendezvous"].message == "gloo over eth7"
    assert found["all-reduce"].message == "40 µs, bus 3.46 GB/s"


def test_wrong_sum_fails():
    check = problems(checks(all_reduce_right=False))["all-reduce"]
    assert (check.status, check.message) == ("fail", "the sum over ranks is wrong")
    assert "leave this node out" in check.fix


def test_ranks_with_other_versions_are_named():
    ranks = [rank(0), rank(1, versions={"torch": "1"})]
    assert problems(checks(ranks)) == {
        "versions": Check(
            "versions",
            "fail",
            "ranks [1] have other versions than rank 0",
            "use one environment on all nodes",
        )
    }


def test_two_processes_of_one_rank_fail_and_the_map_is_shown():
    ranks = [rank(0), rank(0)]
    check = problems(checks(ranks))["mapping"]
    assert (check.status, check.message) == ("fail", "world of 2: 0=n1:cpu, 0=n1:cpu")
    assert "--ranks-per-node" in check.fix


# --- nodes compared -------------------------------------------------------------------------------


def cluster(speeds, pair):
    """One rank on each node; pair(a, b): GB/s between two of them."""
    names = list(speeds)
    return [
        rank(
            number,
            name,
            tflop_per_sec=speeds[name],
            pairs=[[names.index(o), pair(name, o)] for o in names if o != name],
        )
        for number, name in enumerate(names)
    ]


def test_equal_nodes_are_not_slow():
    found = checks(cluster(dict.fromkeys("abcd", 0.05), lambda a, b: 1.0), nodes=4)
    assert problems(found) == {}
    assert found["pair bandwidth"].message.startswith("median 1 GB/s to others")


def test_node_that_computes_slowly_is_named_with_numbers():
    speeds = {**dict.fromkeys("abcd", 0.05), "c": 0.02}
    check = problems(checks(cluster(speeds, lambda a, b: 1.0), nodes=4))["matrix product"]
    assert check.status == "warn"
    assert check.message == "slow: c 0.02; median of 4 nodes 0.05 TFLOP/s a rank"
    assert "exclude c" in check.fix


@pytest.mark.parametrize("names", ["abc", "abcd", "abcde"])
def test_node_that_talks_slowly_is_named_and_its_partners_are_not(names):
    speeds = dict.fromkeys(names, 0.05)
    found = checks(cluster(speeds, lambda a, b: 0.1 if "b" in (a, b) else 1.0), nodes=len(names))
    assert list(problems(found)) == ["pair bandwidth"]
    assert found["pair bandwidth"].message.startswith("slow: b 0.1; median")


@pytest.mark.parametrize("players", [1, 2, 3, 4, 7, 8])
def test_tournament_brings_each_pair_together_once(players):
    met = [frozenset(pair) for partners in tournament(players) for pair in partners.items()]
    assert sorted(map(sorted, met)) == sorted(
        [a, b] for a in range(players) for b in range(a + 1, players) for _ in range(2)
    )


def test_large_tournament_is_cut_and_still_gives_each_node_a_median():
    rounds = list(tournament(64))
    assert len(rounds) == PAIR_ROUNDS
    assert statistics.mean(len(partners) for partners in rounds) == 64


# --- which network NCCL chose ---------------------------------------------------------------------


IB = """\
node02:4711:4790 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Using internal net plugin.
node02:4711:4790 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB ib0:10.1.0.2<0>
node02:4711:4790 [0] NCCL INFO Using network IB
"""
SOCKET = """\
node02:4711:4790 [0] NCCL INFO NET/IB : No device found.
node02:4711:4790 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>
node02:4711:4790 [0] NCCL INFO Using network Socket
"""


@pytest.mark.parametrize(("log", "network"), [(IB, "IB mlx5_0"), (SOCKET, "Socket eth0"), ("", "")])
def test_network_is_read_from_what_nccl_says(log, network):
    assert network_chosen(log) == network


def test_sockets_where_there_is_infiniband_are_reported():
    ranks = [
        rank(0, "n1", infiniband=True, network="IB mlx5_0"),
        rank(1, "n2", infiniband=True, network="Socket eth0"),
    ]
    check = problems(checks(ranks, backend="nccl"))["network"]
    assert check.status == "warn"
    assert check.message == (
        "NCCL uses IB mlx5_0, Socket eth0: sockets on n2, which have InfiniBand"
    )


def test_sockets_without_infiniband_pass():
    ranks = [rank(n, network="Socket eth0") for n in (0, 1)]
    assert checks(ranks, backend="nccl")["network"] == Check(
        "network", "ok", "NCCL uses Socket eth0"
    )


# --- ranks that fail ------------------------------------------------------------------------------


@pytest.mark.parametrize("time", ["", "2026-11-24T16:08:49 "])
def test_last_error_of_the_logs_is_found_and_older_logs_do_not_count(tmp_path, time):
    log = tmp_path / "7.0.node01.0.log"
    log.write_text(f"Traceback …\n{time}ModuleNotFoundError: No module named 'torch'\n{time}bye\n")
    since = log.stat().st_mtime
    assert last_error(tmp_path, since) == "ModuleNotFoundError: No module named 'torch'"
    assert last_error(tmp_path, since + 1) == ""


# --- floors of GPUs -------------------------------------------------------------------------------

H100 = "NVIDIA H100 80GB HBM3"


def gpus(name=H100, **second):
    first = rank(0, device="cuda:0", gpu=name, tflop_per_sec=740.0, copy_gb_per_sec=52.0)
    changed = {"device": "cuda:1", "tflop_per_sec": 720.0, **second}
    return [first, replace(first, rank=1, **changed)]


def test_good_gpus_are_above_their_floors():
    found = checks(gpus(), backend="nccl", bus_gb_per_sec=150.0)
    assert problems(found) == {}
    assert found["bf16 product"].message == "median 730 TFLOP/s, none below its floor"
    assert {"host copy", "all-reduce rate"} <= found.keys()


@pytest.mark.parametrize(
    ("second", "bus", "name", "message"),
    [
        (
            {"tflop_per_sec": 310.0},
            150.0,
            "bf16 product",
            "n1:cuda:1 310 (a good one has more than 600)",
        ),
        (
            {"copy_gb_per_sec": 6.2},
            150.0,
            "host copy",
            "n1:cuda:1 6.2 (a good one has more than 13)",
        ),
        ({}, 11.0, "all-reduce rate", "n1 11 (a good one has more than 30)"),
    ],
)
def test_a_gpu_below_a_floor_of_its_kind_warns_with_both_numbers(second, bus, name, message):
    found = problems(checks(gpus(**second), backend="nccl", bus_gb_per_sec=bus))
    assert [(check.name, check.status) for check in found.values()] == [(name, "warn")]
    assert message in found[name].message


@pytest.mark.parametrize("name", ["NVIDIA RTX A1000", "NVIDIA H100 PCIe", f"{H100} MIG 1g.10gb"])
def test_a_gpu_without_a_floor_is_recorded(name):
    found = checks(gpus(name, tflop_per_sec=1.0, copy_gb_per_sec=0.1), backend="nccl")
    assert problems(found) == {}
    assert "no floor is known" in found["bf16 product"].message


def test_ranks_of_several_nodes_have_no_floor_of_the_all_reduce():
    ranks = [replace(each, pairs=[(1 - each.rank, 9.0)]) for each in gpus(host="n2")]
    found = checks(ranks, nodes=2, backend="nccl", bus_gb_per_sec=1.0)
    assert "all-reduce rate" not in found


def test_ranks_on_cpus_have_no_floors():
    assert not {"bf16 product", "host copy", "all-reduce rate"} & checks().keys()
