"""Shipped GPU profiles on nodes as kernels list them: none is refused, and NCCL gets what it needs."""

from dataclasses import replace
from pathlib import Path

import pytest
from support import sysfs

from forge.cluster import network
from forge.cluster.placement import WorldLayout
from forge.core.machine import load_machine
from forge.preflight import node_checks
from forge.preflight.node_checks import Wanted

PROFILES = Path(__file__).parents[3] / "profiles"
OF_NETWORK = ("infiniband", "interface", "gpus")


@pytest.fixture
def node(tmp_path, monkeypatch):
    """node(tree): this host has the tree's ports and interfaces, four GPUs and nothing exported."""
    monkeypatch.setattr(network, "count_gpus", lambda: 4)
    monkeypatch.setattr(network, "available_cores", lambda: 64)
    monkeypatch.setattr(network, "interface_towards", lambda _: "em4")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "IB_IFNAME", "NCCL_IB_GID_INDEX"):
        monkeypatch.delenv(name, raising=False)
    return lambda tree: tree.install(tmp_path, monkeypatch)


def fabric_variables(machine):
    """Variables of NCCL and Gloo, with reasons; not those of threads and of the hub."""
    found = network.rank_settings(machine, WorldLayout(2, 4), "10.32.0.1")
    names = ("NCCL_", "GLOO_")
    return {s.name: (s.value, s.reason) for s in found if s.name.startswith(names)}


def checks(machine, folder):
    wanted = Wanted(
        **{"results": str(folder), "data": "", "staged": "", "digest": ""},
        **{"machine": machine, "ranks_per_node": 4, "program": None, "master": "10.32.0.1"},
    )
    written = node_checks.write_results(folder)
    found = node_checks.node_checks(wanted, written.check)
    return {check.name: check for check in found if check.name in OF_NETWORK}


def interface(name, reason):
    return {"GLOO_SOCKET_IFNAME": (name, reason), "NCCL_SOCKET_IFNAME": (name, reason)}


INFINIBAND = {"NCCL_IB_DISABLE": ("0", f"mlx5_0 port 1 (InfiniBand, {sysfs.NDR}) and 3 more")}
ROCE = {"NCCL_IB_DISABLE": ("0", "mlx5_0 port 1 (RoCE, 100 Gb/sec (2X HDR)) and 3 more")}
NO_PORT = {"NCCL_IB_DISABLE": ("1", "no port of InfiniBand or RoCE is active")}
NEVER = {"NCCL_IB_DISABLE": ("1", "fabric.infiniband: never")}
OVER_IB0 = interface("ib0", "InfiniBand with an address")
BY_ROUTE = interface("em4", "routes to 10.32.0.1")
GID_3 = {"NCCL_IB_GID_INDEX": ("3", "fabric.gid_index, which NCCL reads for RoCE")}


@pytest.mark.parametrize(
    ("profile", "tree", "expected"),
    [
        ("kempner", sysfs.H100_WITH_IPOIB, {**OVER_IB0, **INFINIBAND}),
        ("kempner", sysfs.H100_WITHOUT_IPOIB, {**BY_ROUTE, **INFINIBAND}),
        ("kempner", sysfs.ROCE, {**BY_ROUTE, **ROCE}),
        ("kempner", sysfs.ETHERNET_ONLY, {**BY_ROUTE, **NO_PORT}),
        ("ethernet", sysfs.ETHERNET_ONLY, {**BY_ROUTE, **NEVER}),
        ("ethernet", sysfs.ROCE, {**BY_ROUTE, **NEVER}),
        ("interactive", sysfs.H100_WITH_IPOIB, {**OVER_IB0, **INFINIBAND}),
        ("interactive", sysfs.ROCE, {**BY_ROUTE, **ROCE}),
    ],
)
def test_node_is_not_refused_and_its_variables_are_as_recorded(
    node, tmp_path, profile, tree, expected
):
    node(tree)
    machine = load_machine(PROFILES / profile / "machine.yaml")
    assert fabric_variables(machine) == expected
    assert [c for c in checks(machine, tmp_path).values() if c.status != "ok"] == []


def with_gid_index(index):
    return load_machine(PROFILES / "kempner/machine.yaml", {"fabric.gid_index": index})


@pytest.mark.parametrize("tree", [sysfs.H100_WITH_IPOIB, sysfs.H100_WITHOUT_IPOIB])
def test_gid_index_means_nothing_on_infiniband(node, tmp_path, monkeypatch, tree):
    node(tree)
    machine = with_gid_index(3)
    assert "NCCL_IB_GID_INDEX" not in fabric_variables(machine)
    assert checks(machine, tmp_path)["infiniband"].status == "ok"
    monkeypatch.setenv("NCCL_IB_GID_INDEX", "5")  # as another cluster's start-up files may
    assert checks(machine, tmp_path)["infiniband"].status == "ok"


def test_gid_index_of_roce_is_set_and_one_that_a_port_lacks_is_refused(node, tmp_path):
    node(sysfs.ROCE)
    assert fabric_variables(with_gid_index(3)) == {**BY_ROUTE, **ROCE, **GID_3}
    assert checks(with_gid_index(3), tmp_path)["infiniband"].status == "ok"
    node(sysfs.ROCE_WITHOUT_ADDRESS)
    check = checks(with_gid_index(3), tmp_path)["infiniband"]
    assert check.status == "fail"
    assert "fabric.gid_index is 3: mlx5_3 port 1 (RoCE, " in check.message
    assert "has no GID 3; it has 0 IB/RoCE v1, 1 RoCE v2" in check.message


def test_infiniband_beside_roce_is_not_asked_for_the_gid_index(node, tmp_path):
    mixed = replace(
        sysfs.H100_WITH_IPOIB,
        devices={"mlx5_0": sysfs.infiniband(0), "mlx5_1": sysfs.roce(1)},
    )
    node(mixed)
    assert fabric_variables(with_gid_index(3))["NCCL_IB_GID_INDEX"][0] == "3"
    assert checks(with_gid_index(3), tmp_path)["infiniband"].status == "ok"
