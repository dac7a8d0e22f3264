"""Ports of InfiniBand and RoCE as a kernel lists them, in a tree of the same form."""

import pytest

from forge.hosts import network

NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
GID = "fe80:0000:0000:0000:0a94:efff:fe81:f3a4"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """tree("mlx5_0", …): a port in the tree that stands for /sys/class/infiniband."""

    def port(device, state="4: ACTIVE", layer="InfiniBand", gids=(GID,), types=()):
        folder = tmp_path / device / "ports/1"
        (folder / "gids").mkdir(parents=True)
        (folder / "gid_attrs/types").mkdir(parents=True)
        for name, text in (
            ("state", state),
            ("link_layer", layer),
            ("rate", "100 Gb/sec (4X EDR)"),
        ):
            (folder / name).write_text(f"{text}\n")
        for index, gid in enumerate(gids):
            (folder / f"gids/{index}").write_text(f"{gid}\n")
        for index, kind in enumerate(types):
            (folder / f"gid_attrs/types/{index}").write_text(f"{kind}\n")

    monkeypatch.setattr(network, "RDMA_DEVICES", tmp_path)
    return port


def test_active_ports_are_found_by_state_with_link_layer_and_rate(tree):
    tree("mlx5_1", layer="Ethernet", types=["RoCE v2"])
    tree("mlx5_0")
    tree("mlx5_2", state="1: DOWN")
    tree("mlx5_3", state="2: INIT")
    assert [str(port) for port in network.active_ports()] == [
        "mlx5_0 port 1 (InfiniBand, 100 Gb/sec (4X EDR))",
        "mlx5_1 port 1 (RoCE, 100 Gb/sec (4X EDR))",
    ]


def test_node_without_such_devices_has_no_ports(tree):
    assert network.active_ports() == []


def test_port_that_cannot_be_read_is_left_out(tree, tmp_path):
    tree("mlx5_0")
    tree("mlx5_1")
    (tmp_path / "mlx5_0/ports/1/rate").unlink()
    assert [port.device for port in network.active_ports()] == ["mlx5_1"]


def test_gid_index_that_is_not_there_or_of_the_wrong_type_is_named(tree):
    kinds = ["IB/RoCE v1", "RoCE v2", "IB/RoCE v1", "RoCE v2"]
    tree("mlx5_0", layer="Ethernet", gids=[GID, GID, GID, GID, NO_GID], types=kinds)
    [port] = network.active_ports()
    assert network.gid_trouble(port, 3) == ""
    assert "of type IB/RoCE v1" in network.gid_trouble(port, 2)
    assert "those of RoCE v2 are 1, 3" in network.gid_trouble(port, 2)
    assert "has no GID 4; it has 0 IB/RoCE v1, 1 RoCE v2" in network.gid_trouble(port, 4)


def test_gid_index_does_not_matter_to_an_infiniband_port(tree):
    tree("mlx5_0", types=["IB/RoCE v1"])
    [port] = network.active_ports()
    assert (network.gid_trouble(port, 0), network.gid_trouble(port, 3)) == ("", "")
