"""A rank that talks over the wrong wire is slow or hangs: what is set, and why, is data."""

import os
import socket
from types import SimpleNamespace

import psutil
import pynvml
import pytest

from forge.core.errors import ConfigError
from forge.core.machine import load_machine
from forge.core.process import hostname
from forge.hosts import network
from forge.hosts.network import Setting
from forge.hosts.placement import WorldLayout

OFFLINE = [
    ("HF_HUB_OFFLINE", "1", "ranks never access the internet"),
    ("TRANSFORMERS_OFFLINE", "1", "ranks never access the internet"),
    ("HF_DATASETS_OFFLINE", "1", "ranks never access the internet"),
]
COMMON = [
    ("OMP_NUM_THREADS", "4", "the node's cores divided by its ranks"),
    ("TOKENIZERS_PARALLELISM", "false", "no thread pool in addition to the training threads"),
    *OFFLINE,
]
DEBUG = [
    ("NCCL_DEBUG", "INFO", "fabric.debug"),
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "fabric.debug"),
    ("PYTHONUNBUFFERED", "1", "fabric.debug"),
]


def interfaces(*, found):
    name, reason = found
    return [
        ("GLOO_SOCKET_IFNAME", name, reason),
        ("NCCL_SOCKET_IFNAME", f"={name}", reason),  # not a prefix of others
    ]


LOST_PEER = (
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "3",
    "a rank whose peer is lost ends, and does not hang",
)
WITHOUT_INFINIBAND = [
    *COMMON,
    *interfaces(found=("eth7", "routes to 10.0.0.1")),
    ("NCCL_IB_DISABLE", "1", "no port of InfiniBand or RoCE is active"),
    LOST_PEER,
]
WITH_INFINIBAND = [
    *COMMON,
    *interfaces(found=("ib0", "InfiniBand with an address")),
    ("NCCL_IB_DISABLE", "0", "ib0 is InfiniBand"),
    LOST_PEER,
]


IB_PORT = network.Port("mlx5_1", "1", "InfiniBand", "400 Gb/sec (4X NDR)", {0: ""})


@pytest.fixture
def node(monkeypatch):
    """A node with 8 cores; the function it gives says what the node's network is."""
    monkeypatch.setattr(network, "available_cores", lambda: 8)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "IB_IFNAME"):
        monkeypatch.delenv(name, raising=False)

    def with_network(infiniband=None, towards="eth7", ports=()):
        monkeypatch.setattr(network, "active_ports", lambda: list(ports))
        monkeypatch.setattr(network, "infiniband_interface", lambda: infiniband)
        monkeypatch.setattr(network, "interface_towards", lambda _: towards)

    return with_network


def settings(ranks_per_node=2, **keys):
    machine = load_machine(None, {f"fabric.{key}": value for key, value in keys.items()})
    found = network.rank_settings(machine, WorldLayout(1, ranks_per_node), "10.0.0.1")
    return [(setting.name, setting.value, setting.reason) for setting in found]


def test_settings_without_infiniband_are_as_recorded(node):
    node()
    assert settings() == WITHOUT_INFINIBAND


def test_settings_with_infiniband_are_as_recorded(node):
    node(infiniband="ib0")
    assert settings() == WITH_INFINIBAND


def test_interface_of_the_machine_file_wins_and_infiniband_stays_on(node):
    node(infiniband="ib0")
    assert settings(interface="bond0") == [
        *COMMON,
        *interfaces(found=("bond0", "fabric.interface")),
        *WITH_INFINIBAND[-2:],
    ]


def test_interface_of_the_nodes_own_line_wins_over_all(node):
    node(infiniband="ib0")
    found = settings(interface="bond0", interfaces={hostname(): "em4", "other": "eno1"})
    assert interfaces(found=("em4", f"fabric.interfaces of {hostname()}"))[0] in found


def test_rdma_without_an_address_is_used_over_the_interface_of_the_route(node):
    """As RoCE, and InfiniBand without IPoIB."""
    node(ports=[network.Port("mlx5_0", "1", "Ethernet", "100 Gb/sec"), IB_PORT])
    assert settings() == [
        *COMMON,
        *interfaces(found=("eth7", "routes to 10.0.0.1")),
        ("NCCL_IB_DISABLE", "0", "mlx5_0 port 1 (RoCE, 100 Gb/sec) and 1 more"),
        LOST_PEER,
    ]


def test_rdma_may_be_switched_off_and_asked_for_where_there_is_none(node):
    node(infiniband="ib0", ports=[IB_PORT])
    found = settings(infiniband="never")
    assert ("NCCL_IB_DISABLE", "1", "fabric.infiniband: never") in found
    assert interfaces(found=("eth7", "routes to 10.0.0.1"))[0] in found
    node()
    found = settings(infiniband="always")
    assert ("NCCL_IB_DISABLE", "0", "fabric.infiniband: always") in found


@pytest.mark.parametrize(
    ("exported", "backend", "chosen"),
    [
        ({"GLOO_SOCKET_IFNAME": "em4"}, "gloo", "em4"),
        ({"GLOO_SOCKET_IFNAME": "em4", "NCCL_SOCKET_IFNAME": "lo"}, "nccl", "lo"),
        ({"GLOO_SOCKET_IFNAME": "em4", "NCCL_SOCKET_IFNAME": "lo"}, "gloo", "em4"),
        ({"IB_IFNAME": "ib7"}, "nccl", "ib7"),
        ({"NCCL_SOCKET_IFNAME": "^docker,lo"}, "nccl", "eth7"),  # NCCL's own choice by exclusion
        ({"NCCL_SOCKET_IFNAME": "eth"}, "nccl", "eth7"),  # NCCL's prefix
        ({"NCCL_SOCKET_IFNAME": "=lo"}, "nccl", "lo"),
        ({"NCCL_SOCKET_IFNAME": "=lo,em4"}, "nccl", "eth7"),
    ],
)
def test_exported_interface_is_the_one_that_preflight_tests_too(
    node, monkeypatch, exported, backend, chosen
):
    node()
    for name, value in exported.items():
        monkeypatch.setenv(name, value)
    fabric = load_machine(None, {"fabric.backend": backend, "fabric.interface": "eth7"}).fabric
    assert network.choose_interface(fabric, "10.0.0.1")[0] == chosen


def test_threads_are_those_that_slurm_gave_a_rank(node):
    node()
    machine = load_machine(None)
    found = network.rank_settings(machine, WorldLayout(2, 4), "10.0.0.1", cpus=3)
    assert ("OMP_NUM_THREADS", "3") in [(s.name, s.value) for s in found]


def test_gid_index_is_set_where_a_port_is_roce_only(node):
    node(ports=[network.Port("mlx5_0", "1", "Ethernet", "100 Gb/sec")])
    of_roce = ("NCCL_IB_GID_INDEX", "3", "fabric.gid_index, which NCCL reads for RoCE")
    assert of_roce in settings(gid_index=3)
    node(infiniband="ib0", ports=[IB_PORT])
    assert settings(gid_index=3) == settings()
    node()
    assert settings(gid_index=3) == WITHOUT_INFINIBAND


def test_gpus_note_which_collectives_they_have_started_unless_that_would_cost_overlap(
    node, monkeypatch
):
    node()
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    assert network.STARTED not in found_settings()
    monkeypatch.setattr(network, "count_gpus", lambda: 4)
    assert network.STARTED in found_settings()
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert network.STARTED not in found_settings()


def found_settings():
    return network.rank_settings(load_machine(None), WorldLayout(1, 2), "10.0.0.1")


def test_gpus_get_memory_that_can_grow_unless_the_user_has_exported_how(node, monkeypatch):
    node()
    why = "no memory of a GPU is lost to fragments"
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(network, "count_gpus", lambda: 4)
    assert settings() == [
        *WITHOUT_INFINIBAND,
        ("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0", network.RETHROW.reason),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True", why),
    ]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    machine = load_machine(None)
    found = network.rank_settings(machine, WorldLayout(1, 2), "10.0.0.1")
    kept = network.apply(found[-1:], user_threads=None)
    assert [(s.name, s.value, s.won) for s in kept] == [
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64", False)
    ]
    assert "PYTORCH_ALLOC_CONF" not in os.environ
    machine = load_machine(None, {"device": "cpu"})
    assert found[:-2] == network.rank_settings(machine, WorldLayout(1, 2), "10.0.0.1")


def test_debug_adds_its_variables(node):
    node()
    assert settings(debug=True) == [*WITHOUT_INFINIBAND, *DEBUG]


def test_unknown_route_leaves_the_choice_to_the_backend(node):
    node(towards=None)
    assert settings() == [*COMMON, *WITHOUT_INFINIBAND[-2:]]


@pytest.mark.parametrize(("ranks", "threads"), [(1, "8"), (3, "2"), (8, "1"), (20, "1")])
def test_cores_are_shared_out_among_ranks(node, ranks, threads):
    node()
    assert settings(ranks)[0][:2] == ("OMP_NUM_THREADS", threads)


def test_what_the_user_exported_wins_and_is_reported(monkeypatch):
    monkeypatch.setenv("NCCL_IB_DISABLE", "0")
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    wanted = [Setting("NCCL_IB_DISABLE", "1", "a"), Setting("NCCL_DEBUG", "INFO", "b")]
    assert network.apply(wanted, user_threads=None) == [
        Setting("NCCL_IB_DISABLE", "0", "in place of 1 (a)", won=False),
        Setting("NCCL_DEBUG", "INFO", "b", won=True),
    ]
    assert (os.environ["NCCL_IB_DISABLE"], os.environ["NCCL_DEBUG"]) == ("0", "INFO")
    monkeypatch.delenv("NCCL_DEBUG")


def test_timeout_that_the_user_exported_wins_and_is_said(monkeypatch, capsys):
    machine = load_machine(None, {"fabric.timeout_sec": 300, "fabric.debug": True})
    monkeypatch.delenv("NCCL_TIMEOUT", raising=False)
    assert network.with_exported_timeout(machine) == machine
    monkeypatch.setenv("NCCL_TIMEOUT", "1800")
    found = network.with_exported_timeout(machine)
    assert (found.fabric.timeout_sec, found.fabric.debug) == (1800, True)
    said = "keeping your exported NCCL_TIMEOUT=1800 (fabric.timeout_sec is 300)"
    assert said in capsys.readouterr().err
    assert network.with_exported_timeout(found) == found
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("value", ["half an hour", "0", "-5", "inf"])
def test_exported_timeout_that_is_not_a_time_is_refused_by_name(monkeypatch, value):
    monkeypatch.setenv("NCCL_TIMEOUT", value)
    with pytest.raises(ConfigError, match=f"NCCL_TIMEOUT={value} is not a time") as caught:
        network.with_exported_timeout(load_machine(None))
    assert caught.value.fix.startswith("unset NCCL_TIMEOUT")


@pytest.mark.parametrize(("mine", "stays"), [(None, "4"), ("3", "3")])
def test_threads_of_a_launcher_are_replaced_those_of_the_user_stay(monkeypatch, mine, stays):
    for name in ("OMP", "MKL", "OPENBLAS", "NUMEXPR"):
        monkeypatch.setenv(f"{name}_NUM_THREADS", "1")
    network.apply([Setting("OMP_NUM_THREADS", "4", "shared out")], user_threads=mine)
    assert os.environ["OMP_NUM_THREADS"] == stays
    assert not {"MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"} & set(os.environ)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.1.2.3", "localhost"])
def test_loopback_is_reached_over_lo(address):
    assert network.interface_towards(address) == "lo"


def test_ranks_that_meet_at_the_loopback_address_listen_nowhere_else(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "IB_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(network, "infiniband_interface", lambda: "ib0")
    keys = {"fabric.interface": "bond0", f"fabric.interfaces.{hostname()}": "em4"}
    for machine in (load_machine(None), load_machine(None, keys)):
        chosen = network.choose_interface(machine.fabric, "127.0.0.1")
        assert chosen == ("lo", "all ranks are on this node")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert network.choose_interface(machine.fabric, "127.0.0.1")[0] == "eth7"


def test_name_that_does_not_resolve_has_no_interface():
    assert network.interface_towards("no such host") is None


def test_infiniband_is_known_by_its_type_not_its_name(monkeypatch, tmp_path):
    address = [SimpleNamespace(family=socket.AF_INET)]
    there = {"ib0": address, "odd1": [], "odd2": address, "odd3": address}
    up = {name: SimpleNamespace(isup=name != "odd2") for name in there}
    for name, kind in (("ib0", 1), ("odd1", 32), ("odd2", 32), ("odd3", 32)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "type").write_text(f"{kind}\n")
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: there)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: up)
    monkeypatch.setattr(network, "INTERFACES", tmp_path)
    # ib0 is ethernet by another name, odd1 has no address, odd2 is down.
    assert network.infiniband_interface() == "odd3"


def test_cached_files_count_as_memory_that_is_left(tmp_path):
    facts = "anon 700\nfile 200\ninactive_file 150\nactive_file 50\nslab 9\n"
    (tmp_path / "memory.stat").write_text(facts)
    assert network._file_cache(tmp_path) == 200


def test_gpus_without_device_files_are_counted_by_nvml(tmp_path, monkeypatch):
    monkeypatch.setattr(network, "DEVICES", tmp_path)  # as in WSL
    (tmp_path / "nvidia0").touch()  # no device
    assert network.count_gpus() == 0
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 2)
    assert network.count_gpus() == 2
