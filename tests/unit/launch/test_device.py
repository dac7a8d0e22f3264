"""The device of a rank. A rank that silently trains on its CPU, or on the GPU of another, costs days; so
every binding of GPUs to ranks that launchers make is a case here. No GPU is needed: the choice is a
function of what the ranks report."""

import multiprocessing
import os
import socket
import types

import pytest
import torch

from forge.core.errors import ConfigError, UnfitError
from forge.core.machine import Machine, load_machine
from forge.launch import device
from forge.launch.device import Seen, choose
from forge.launch.process_group import joined
from forge.launch.rank import Rank


def ranks(*nodes, present=None):
    """What each rank sees. nodes: for each node the UUIDs that each of its ranks can use."""
    return [
        Seen(f"node{number}", local, list(gpus), len(gpus) if present is None else present)
        for number, node in enumerate(nodes)
        for local, gpus in enumerate(node)
    ]


def chosen(seen, ranks_per_node, **machine):
    values = {key.replace("__", "."): value for key, value in machine.items()}
    return [
        str(
            choose(
                seen,
                Rank(n, n % ranks_per_node, len(seen), ranks_per_node),
                load_machine(None, values),
            )
        )
        for n in range(len(seen))
    ]


def test_ranks_that_see_all_gpus_of_their_node_take_the_one_of_their_local_rank():
    seen = ranks(["ab", "ab"], ["cd", "cd"])
    assert chosen(seen, 2) == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]


def test_ranks_bound_to_one_gpu_each_take_index_0():
    assert chosen(ranks(["a", "b"], ["c", "d"]), 2) == ["cuda:0"] * 4


def test_more_gpus_than_ranks_are_fine():
    assert chosen(ranks(["abcd", "abcd"]), 2) == ["cuda:0", "cuda:1"]


def test_gloo_on_gpus_keeps_the_gpus():
    assert chosen(ranks(["ab", "ab"]), 2, fabric__backend="gloo") == ["cuda:0", "cuda:1"]


def test_two_ranks_that_were_shown_the_same_gpu_are_refused():
    with pytest.raises(ConfigError, match=r"ranks 0, 1 on node0 share one GPU \(a\)"):
        chosen(ranks(["a", "a"]), 2)


def test_slices_of_one_gpu_are_used_by_gloo_and_refused_with_nccl(monkeypatch):
    monkeypatch.delenv(device.NCCL_ON_SLICES, raising=False)
    seen = ranks([["MIG-a"], ["MIG-b"]])
    with pytest.raises(
        ConfigError, match=r"2 of 2 ranks have MIG slices \(rank 0 on node0: MIG-a\)"
    ):
        chosen(seen, 2)
    assert chosen(seen, 2, fabric__backend="gloo") == ["cuda:0", "cuda:0"]
    monkeypatch.setenv(device.NCCL_ON_SLICES, "1")
    assert chosen(seen, 2) == ["cuda:0", "cuda:0"]
    with pytest.raises(ConfigError, match=r"ranks 0, 1 on node0 share one GPU \(MIG-a\)"):
        chosen(ranks([["MIG-a"], ["MIG-a"]]), 2)


def test_one_rank_trains_on_a_slice():
    assert chosen(ranks([["MIG-a"]]), 1) == ["cuda:0"]


@pytest.mark.parametrize(
    ("visible", "local_rank", "expected"),
    [
        ("MIG-a,MIG-b", 0, "MIG-a"),
        ("MIG-a,MIG-b", 1, "MIG-b"),
        ("MIG-b", 1, "MIG-b"),  # bound by the launcher
        ("0,1", 1, "0,1"),
    ],
)
def test_a_rank_takes_the_slice_of_its_local_rank(monkeypatch, visible, local_rank, expected):
    """CUDA uses the first slice of the list only."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    Seen.here(Rank(local_rank, local_rank, 2, 2), "auto")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected


def test_a_rank_names_its_slice_not_the_gpu_of_it(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    gpu = types.SimpleNamespace(uuid="of the whole GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    assert Seen.here(Rank(1, 1, 2, 2), "auto").gpus == ["MIG-b"]


def test_equal_uuids_on_two_nodes_are_two_gpus():
    # Some hypervisors give each guest's first GPU the same UUID.
    assert chosen(ranks(["a"], ["a"]), 1) == ["cuda:0", "cuda:0"]


@pytest.mark.parametrize("setting", [{}, {"device": "cuda"}, {"fabric__backend": "nccl"}])
def test_fewer_gpus_than_ranks_on_every_node_are_refused_with_the_numbers(setting):
    match = "4 of 4 ranks have no GPU of their own.*node0 has 2 GPUs, rank 0 can use 2 for 4 ranks"
    with pytest.raises(ConfigError, match=match):
        chosen(ranks(["ab"] * 4), 4, **setting)


def test_a_node_that_lost_a_gpu_is_unhealthy_and_named():
    seen = ranks(["ab", "ab"], ["ab", "ab"])
    lost = [*seen[:2], Seen("node1", 0, [], 2, "no device"), Seen("node1", 1, [], 2, "no device")]
    with pytest.raises(
        UnfitError, match=r"2 of 4 ranks .*: rank 2 \(node1\), 3 \(node1\).*no device"
    ):
        chosen(lost, 2)


def test_without_gpus_anywhere_ranks_use_the_cpu():
    assert chosen(ranks(["", ""]), 2) == ["cpu", "cpu"]


def test_gpus_that_torch_cannot_use_are_never_a_silent_run_on_the_cpu():
    with pytest.raises(ConfigError) as error:
        chosen(ranks([""], present=4), 1)
    assert "node0 has 4 GPUs, rank 0 can use 0" in str(error.value)
    assert "device: cpu" in str(error.value)


def test_device_cpu_is_kept_on_a_node_with_gpus():
    assert chosen(ranks(["a"]), 1, device="cpu") == ["cpu"]


@pytest.mark.parametrize("setting", [{"device": "cuda"}, {"fabric__backend": "nccl"}])
def test_a_machine_without_gpus_cannot_have_device_cuda(setting):
    with pytest.raises(ConfigError, match="1 of 1 ranks have no GPU of their own, and"):
        chosen(ranks([""]), 1, **setting)


def test_nccl_on_cpus_is_refused_when_the_machine_is_read():
    with pytest.raises(ConfigError, match="backend nccl needs GPUs"):
        load_machine(None, {"device": "cpu", "fabric.backend": "nccl"})


def test_a_rank_says_why_torch_can_use_no_gpu(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("torch can use a GPU here")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = Seen.here(Rank(0, 0, 1, 1), "auto")
    assert found.gpus == [] and (torch.version.cuda or "built without CUDA" in found.trouble)
    assert Seen.here(Rank(0, 0, 1, 1), "cpu").trouble == ""


def _join(rank, port, results):
    import os

    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2"
    )
    device.count_gpus = lambda: rank  # only the node of rank 1 has one
    try:
        with joined(Rank(rank, 0, 2, 1), load_machine(None, {"fabric.timeout_sec": 60})):
            results.put((rank, "joined"))
    except ConfigError as err:
        results.put((rank, str(err)))


def test_all_ranks_refuse_alike_before_any_collective():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=_join, args=(rank, port, results)) for rank in range(2)]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(60)
    assert found[0] == found[1] and "2 of 2 ranks have no GPU of their own" in found[0]


def test_machine_knows_whether_it_needs_gpus():
    assert not Machine().needs_gpus and Machine(device="cuda").needs_gpus
