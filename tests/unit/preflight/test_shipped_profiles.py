"""Shipped GPU profiles on nodes as kernels list them: none is refused, and NCCL gets what it needs."""

from dataclasses import replace
from importlib.metadata import PackageNotFoundError

import pytest
from support import sysfs
from support.repository import REPOSITORY

from forge.core.machine import load_machine
from forge.hosts import network
from forge.hosts.placement import WorldLayout
from forge.preflight import node_checks, packages
from forge.preflight.node_checks import Wanted

PROFILES = REPOSITORY / "profiles"
OF_GPU_NODES = ("infiniband", "interface", "gpus", "cuda")


def installed(versions):
    """`importlib.metadata.version` where these are the only packages."""

    def version(name):
        if versions.get(name):
            return versions[name]
        raise PackageNotFoundError(name)

    return version


@pytest.fixture
def node(tmp_path, monkeypatch):
    """node(tree): this host has the tree's ports and interfaces, four GPUs and nothing exported."""
    monkeypatch.setattr(network, "count_gpus", lambda: 4)
    monkeypatch.setattr(network, "available_cores", lambda: 64)
    monkeypatch.setattr(network, "interface_towards", lambda _: "em4")
    monkeypatch.setattr(packages, "version", installed({"torch": "2.13.0+cu130"}))
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
        **{"variables": {}, "threads": None},
    )
    written = node_checks.write_results(folder)
    found = node_checks.node_checks(wanted, written.check)
    return {check.name: check for check in found if check.name in OF_GPU_NODES}


def interface(name, reason):
    return {"GLOO_SOCKET_IFNAME": (name, reason), "NCCL_SOCKET_IFNAME": (f"={name}", reason)}


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


# --- the driver, and the CUDA that torch was built for --------------------------------------------


@pytest.fixture
def cuda(node, tmp_path, monkeypatch):
    """cuda(torch, driver, runtime): the check of a Kempner node with these versions."""

    def check(torch, driver, runtime=""):
        node(sysfs.H100_WITH_IPOIB)
        (tmp_path / "driver").write_text(f"{driver}\n")
        monkeypatch.setattr(packages, "DRIVER", tmp_path / "driver")
        monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
        there = {"torch": torch, "nvidia-cuda-runtime": runtime}

        monkeypatch.setattr(packages, "version", installed(there))
        monkeypatch.setattr(node_checks, "version", lambda name: there.get(name, "1"))
        return checks(load_machine(PROFILES / "kempner/machine.yaml"), tmp_path)["cuda"]

    return check


@pytest.mark.parametrize(
    ("torch", "driver", "runtime", "message"),
    [
        ("2.13.0+cu130", "580.65.06", "", "torch for CUDA 13.0, driver 580.65.06"),
        ("2.13.0", "580.65.06", "13.0.96", "torch for CUDA 13.0.96, driver 580.65.06"),
        ("2.13.0+cu126", "535.183.01", "", "torch for CUDA 12.6, driver 535.183.01"),
        ("2.13.0a0+site", "535.183.01", "", "torch for CUDA unknown, driver 535.183.01"),
        ("2.13.0+cu130", "", "", "torch for CUDA 13.0, driver unknown"),
    ],
)
def test_driver_that_runs_the_build_of_torch_passes(cuda, torch, driver, runtime, message):
    check = cuda(torch, driver, runtime)
    assert (check.status, check.message) == ("ok", message)


def test_driver_too_old_for_the_build_that_pip_takes_is_refused_by_both_versions(cuda):
    check = cuda("2.13.0", "550.54.15", "13.0.96")
    assert check.status == "fail"
    assert (
        check.message
        == "torch is for CUDA 13.0.96, which needs NVIDIA driver 580; this is 550.54.15"
    )
    assert "docs/new-cluster.md, step 3" in check.fix


def test_older_driver_with_the_forward_compatibility_package_passes(cuda, tmp_path, monkeypatch):
    assert cuda("2.13.0+cu130", "550.54.15").status == "fail"
    (tmp_path / "libcuda.so.1").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert node_checks._cuda().status == "ok"


def test_build_for_cpus_is_refused_on_a_node_that_needs_gpus(cuda):
    check = cuda("2.13.0+cpu", "580.65.06")
    assert (check.status, check.message) == ("fail", "torch 2.13.0+cpu is a build for CPUs")


@pytest.mark.parametrize(("slices", "status"), [(4, "ok"), (3, "fail")])
def test_slices_of_mig_are_the_gpus_of_a_node(node, tmp_path, monkeypatch, slices, status):
    node(sysfs.H100_WITH_IPOIB)
    monkeypatch.setattr(network, "count_gpus", lambda: 1)
    names = ",".join(f"MIG-{number}" for number in range(slices))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
    check = checks(load_machine(PROFILES / "kempner/machine.yaml"), tmp_path)["gpus"]
    assert (check.status, check.message) == (status, f"{slices} GPUs for 4 ranks")
