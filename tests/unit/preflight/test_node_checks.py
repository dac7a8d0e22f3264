"""Each check of a node must name what is wrong with the node, and what to do about it."""

import errno
import os
import re
import resource
import shutil
import socket
import threading
import time
from collections import namedtuple
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from support import inputs
from support.project_plugin import fresh_process, write_documented
from support.shards import make

import forge
from forge.core import project_plugins
from forge.core.errors import ConfigError, UnfitError
from forge.core.machine import load_machine
from forge.core.paths import inputs_folder
from forge.core.process import hostname
from forge.core.records import Check
from forge.data.inputs import InputSet
from forge.data.shards import ShardSet
from forge.hosts import network
from forge.launch.rank_records import ProgramFolders
from forge.preflight import node_checks
from forge.preflight.node_checks import Listener, Wanted, WantedProgram, Written
from forge.staging import on_node

MODEST = {"preflight.min_free_disk_gib": 0, "preflight.min_free_memory_gib": 0}


@pytest.fixture
def wanted(tmp_path):
    """A single node that can read the results and the shards."""
    for name in ("results", "data"):
        (tmp_path / name).mkdir()
    (tmp_path / "data/manifest.json").write_text("{}")
    folders = {"results": str(tmp_path / "results"), "data": str(tmp_path / "data")}
    facts = {"staged": "", "digest": "", "ranks_per_node": 1, "program": None, "master": ""}
    facts |= {"variables": {}, "threads": None}
    return Wanted(**folders, **facts, machine=load_machine(None))


def every_check(wanted, machine):
    written = node_checks.write_results(Path(wanted.results))
    return node_checks.node_checks(replace(wanted, machine=machine), written.check)


def checks(wanted, ranks=1, **limits):
    machine = load_machine(None, {**MODEST, **{k.replace("__", "."): v for k, v in limits.items()}})
    found = every_check(replace(wanted, ranks_per_node=ranks), machine)
    return {check.name: check for check in found}


def problems(found):
    return {check.name: check for check in found.values() if check.status != "ok"}


def test_healthy_node_passes_every_check(wanted):
    found = checks(wanted, preflight__min_open_files=0)
    assert [check.name for check in found.values() if check.status == "fail"] == []
    assert [name for name in found if name != "locked memory"] == [
        *("name", "project", "packages", "data", "results"),
        *("disk", "local disk", "memory", "open files", "cores", "interface"),
    ]


def test_host_name_that_does_not_resolve_only_warns(wanted, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    check = checks(wanted)["name"]
    assert check.status == "warn"
    assert "no-such-host.invalid does not resolve" in check.message
    assert check.fix == "add no-such-host.invalid to /etc/hosts"


def test_unreadable_project_fails(wanted, monkeypatch):
    real = os.access
    monkeypatch.setattr(os, "access", lambda p, m: Path(p).name != "worker.py" and real(p, m))
    check = problems(checks(wanted))["project"]
    assert (check.status, check.fix) == ("fail", "check its file system and mode")
    assert "cannot read" in check.message


def test_missing_package_is_named(wanted, monkeypatch):
    def version(name):
        if name == "blake3":
            raise PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(node_checks, "version", version)
    check = problems(checks(wanted))["packages"]
    assert check == Check("packages", "fail", "package blake3 is missing", "run: make setup")


def test_missing_shards_are_named(wanted):
    manifest = Path(wanted.data) / "manifest.json"
    manifest.unlink()
    check = problems(checks(wanted))["data"]
    assert check == Check("data", "fail", f"cannot read {manifest}", "run: forge tokenize")


def test_results_in_the_home_directory_of_a_cluster_warn(wanted, monkeypatch):
    monkeypatch.setenv("HOME", wanted.results)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert checks(wanted)["results"].status == "ok"
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    check = checks(wanted)["results"]
    assert check.status == "warn" and "in your home directory" in check.message
    assert "scratch" in check.fix


def test_results_that_cannot_be_written_fail(wanted):
    # A file in the way: unlike a mode, it stops root as well.
    inside = Path(wanted.results) / "file"
    inside.touch()
    check = checks(replace(wanted, results=str(inside)))["results"]
    assert check.status == "fail"
    assert str(inside) in check.message
    assert check.fix


@pytest.mark.parametrize(
    ("key", "name", "unit", "fix"),
    [
        ("preflight__min_free_disk_gib", "disk", "GiB free in", "point `results` to another disk"),
        ("preflight__min_free_memory_gib", "memory", "GiB available", "use fewer ranks"),
        ("preflight__min_open_files", "open files", "open files allowed", "ulimit -Hn 4096"),
    ],
)
def test_too_little_fails_with_both_numbers(wanted, key, name, unit, fix):
    check = problems(checks(wanted, **{key: 10**9}))[name]
    assert check.status == "fail"
    assert re.fullmatch(rf"[\d,.]+ {unit}.*, 1e\+09 needed", check.message), check.message
    assert fix in check.fix


def test_memory_is_counted_per_rank(wanted, monkeypatch):
    memory = SimpleNamespace(available=3 * 2**30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    limits = {"preflight__min_free_memory_gib": 2}
    assert checks(wanted, ranks=1, **limits)["memory"].status == "ok"
    assert checks(wanted, ranks=2, **limits)["memory"].message == "3.0 GiB available, 4 needed"


def test_open_files_are_the_hard_limit_to_which_ranks_raise_theirs(wanted, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 255))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    assert checks(wanted)["open files"].message == "255.0 open files allowed, 256 needed"
    assert checks(wanted)["open files"].status == "fail"


def test_more_ranks_than_cores_only_warns(wanted, monkeypatch):
    monkeypatch.setattr(network, "available_cores", lambda: 2)
    check = checks(wanted, ranks=3)["cores"]
    assert (check.status, check.message) == ("warn", "2 cores for 3 ranks")
    assert "fewer ranks" in check.fix


@pytest.mark.parametrize(
    ("threads", "status", "message"),
    [
        (None, "ok", "2 cores for 2 ranks"),
        ("1", "ok", "2 cores for 2 ranks"),
        ("64", "warn", "OMP_NUM_THREADS=64: 64 threads x 2 ranks on 2 cores"),
        ("2,1", "warn", "OMP_NUM_THREADS=2,1: 2 threads x 2 ranks on 2 cores"),
        ("many", "warn", "OMP_NUM_THREADS=many: 2 threads x 2 ranks on 2 cores"),  # all of them
    ],
)
def test_more_threads_than_cores_warn_by_the_name_of_the_variable(
    wanted, monkeypatch, threads, status, message
):
    """OMP_NUM_THREADS=64 of a login shell passed, and every step took longer."""
    monkeypatch.setattr(network, "available_cores", lambda: 2)
    check = checks(replace(wanted, threads=threads), ranks=2)["cores"]
    assert check.status == status and message in check.message
    fix = "unset OMP_NUM_THREADS: Forge then gives each rank 1, its share of the cores"
    assert check.fix == (fix if status == "warn" else "")
    of_machine = replace(wanted, threads=threads, variables={"OMP_NUM_THREADS": threads})
    if status == "warn":
        fix = checks(of_machine, ranks=2)["cores"].fix
        assert fix.startswith("remove OMP_NUM_THREADS from environment in machine.yaml: ")


@pytest.fixture
def interfaces(monkeypatch):
    """A node with eth0, which leads to the others, eth1, which is down, and eth2 without an address."""
    Stats, Address = namedtuple("Stats", "isup"), namedtuple("Address", "family address")
    there = {name: Stats(name != "eth1") for name in ("lo", "eth1", "eth0", "eth2")}
    addresses = {name: [Address(socket.AF_INET, "10.0.0.1")] for name in ("lo", "eth1", "eth0")}
    monkeypatch.setattr(psutil, "net_if_stats", lambda: there)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {**addresses, "eth2": []})
    monkeypatch.setattr(network, "interface_towards", lambda _: "eth0")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "IB_IFNAME", "NCCL_IB_HCA"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("name", "state"), [("ib7", "not there"), ("eth1", "down"), ("eth2", "without an address")]
)
@pytest.mark.usefixtures("interfaces")
def test_interface_that_cannot_serve_fails_and_names_those_that_can(wanted, name, state):
    assert checks(wanted, fabric__interface=name)["interface"] == Check(
        "interface",
        "fail",
        f"{name} (fabric.interface) is {state}",
        "set fabric.interface to one that is up: eth0, lo",
    )


@pytest.mark.parametrize("variable", ["IB_IFNAME", "GLOO_SOCKET_IFNAME"])
@pytest.mark.usefixtures("interfaces")
def test_exported_interface_that_the_node_lacks_is_named_with_its_variable(
    wanted, monkeypatch, variable
):
    """Only Gloo's error told of it, which names no variable."""
    monkeypatch.setenv(variable, "ib9")
    several = replace(wanted, master="n1")
    assert checks(several)["interface"] == Check(
        "interface",
        "fail",
        f"ib9 (your exported {variable}) is not there; up here: eth0, lo",
        f"unset {variable}: this node then takes eth0 (routes to n1); where that is the wrong one, set"
        f" fabric.interfaces.{hostname()}. Then remove the run's bad_nodes.txt, if there is one",
        "for nodes whose interfaces have other names, or misspelt",
    )
    monkeypatch.setenv(variable, "eth0")
    assert checks(several)["interface"] == Check("interface", "ok", "eth0")
    of_machine = replace(wanted, variables={variable: "eth1"})
    check = checks(of_machine)["interface"]
    assert check.message == f"eth1 ({variable} of machine.yaml) is down; up here: eth0, lo"
    assert check.fix.startswith(
        f"remove {variable} from environment in machine.yaml: this node then"
    )


@pytest.mark.usefixtures("interfaces")
def test_each_interface_of_a_list_for_gloo_must_be_there(wanted, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0,lo")
    assert checks(wanted)["interface"].status == "ok"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0,ib9")
    assert "ib9 (your exported GLOO_SOCKET_IFNAME)" in checks(wanted)["interface"].message


@pytest.mark.parametrize(
    ("value", "fits"),
    [
        *(("eth", True), ("=eth0", True), ("^lo", True), ("ib9,eth0", True), ("^", True)),
        *(("ib", False), ("=eth", False), ("^eth,lo", False)),
    ],
)
@pytest.mark.usefixtures("interfaces")
def test_prefixes_and_exclusions_of_nccl_fit_where_one_interface_does(
    wanted, monkeypatch, value, fits
):
    """So that one value serves nodes whose interfaces have different names."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", value)
    check = checks(wanted, fabric__backend="nccl")["interface"]
    assert check.status == ("ok" if fits else "fail")
    told = f"{value} (your exported NCCL_SOCKET_IFNAME) is no interface of this node; up here: eth0, lo"
    assert fits or check.message == told
    assert checks(wanted)["interface"].status == "ok"  # Gloo does not read it


@pytest.mark.usefixtures("interfaces")
def test_devices_for_nccl_that_the_node_lacks_are_named(wanted, monkeypatch):
    port = network.Port("mlx5_0", "1", "InfiniBand", "400 Gb/sec")
    monkeypatch.setattr(network, "active_ports", lambda: [port])
    several = replace(wanted, master="n1")
    for value in ("mlx5", "=mlx5_0:1", "mlx5_7,mlx5_0", "^mlx5_7"):
        monkeypatch.setenv("NCCL_IB_HCA", value)
        assert "ports" not in checks(several, fabric__backend="nccl"), value
    for value in ("mlx5_0:2", "=mlx5", "^mlx5", "mlx4_0"):
        monkeypatch.setenv("NCCL_IB_HCA", value)
        check = checks(several, fabric__backend="nccl")["ports"]
        told = f"{value} (your exported NCCL_IB_HCA) is no active port of this node; active here:"
        assert (check.status, check.message) == ("fail", f"{told} mlx5_0:1")
    assert checks(wanted, fabric__backend="nccl")["ports"].status == "warn"  # one node needs none
    assert "ports" not in checks(several)  # Gloo does not read it
    monkeypatch.setattr(network, "active_ports", list)
    check = checks(several, fabric__backend="nccl")["ports"]
    assert check.status == "warn" and check.message.endswith("active here: none")
    assert "ports" not in checks(several, fabric__backend="nccl", fabric__infiniband="never")


def test_interface_of_this_node_in_the_map_wins_and_is_named_by_its_key(wanted):
    key = f"fabric.interfaces.{hostname()}"
    machine = load_machine(None, {"fabric.interfaces": {hostname(): "none1"}})
    (check,) = [c for c in every_check(wanted, machine) if c.name == "interface"]
    assert check.message == f"none1 ({key}) is not there"
    assert key in check.fix
    machine = load_machine(
        None, {"fabric.interface": "none0", "fabric.interfaces": {hostname(): "lo"}}
    )
    (check,) = [c for c in every_check(wanted, machine) if c.name == "interface"]
    assert (check.status, check.message) == ("ok", "lo")


def test_loopback_is_refused_as_interface_for_several_nodes(wanted):
    check = problems(checks(replace(wanted, master="localhost")))["interface"]
    assert check.status == "fail"
    assert "other nodes cannot reach lo" in check.message
    assert "localhost does not resolve here, or to a loopback address" in check.cause


def test_full_local_disk_fails(wanted, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("SLURM_TMPDIR", raising=False)

    def fsync(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    check = problems(checks(wanted))["local disk"]
    assert check.status == "fail"
    assert "No space left on device, 16 MiB needed" in check.message
    assert str(tmp_path) in check.fix
    assert list(tmp_path.glob(".forge*")) == []


def test_local_disk_is_checked_by_a_file_whose_name_nobody_can_know(wanted, monkeypatch, tmp_path):
    planted = tmp_path / "tmp" / f".forge-preflight-{os.getpid()}"
    planted.mkdir(parents=True)
    monkeypatch.setenv("TMPDIR", str(planted.parent))
    monkeypatch.delenv("SLURM_TMPDIR", raising=False)
    assert checks(wanted)["local disk"].status == "ok"
    assert list(planted.parent.iterdir()) == [planted]


def test_staged_shards_must_have_the_staged_digest(wanted, tmp_path):
    folder = tmp_path / "staged"
    make(folder)
    digest = ShardSet.open(folder).digest
    staged = replace(wanted, staged=str(folder), digest=digest)
    assert checks(staged)["data"] == Check("data", "ok", f"staged shards in {folder}")
    other = problems(checks(replace(staged, digest="f" * 64)))["data"]
    assert "digest" in other.message and other.cause == "staged for other data"
    next(folder.glob("*.bin")).unlink()
    gone = problems(checks(staged))["data"]
    assert (gone.status, gone.fix) == ("fail", "run: forge stage")


def test_staged_shards_that_are_gone_only_warn_where_the_shared_ones_are_readable(wanted, tmp_path):
    staged = replace(wanted, staged=str(tmp_path / "gone"), digest="f" * 64)
    check = checks(staged)["data"]
    assert (check.status, check.fix) == ("warn", "run: forge stage")
    assert f"ranks read {wanted.data}" in check.message
    blind = checks(replace(staged, data=str(tmp_path / "none")))["data"]
    assert blind.status == "fail"


def test_slices_of_a_gpu_count_as_gpus(wanted, monkeypatch):
    monkeypatch.setattr(network, "count_gpus", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b")
    assert checks(wanted, ranks=2, fabric__backend="nccl")["gpus"].status == "ok"
    assert checks(wanted, ranks=3, fabric__backend="nccl")["gpus"].status == "fail"


def test_gpus_are_counted_where_the_backend_needs_them(wanted, monkeypatch):
    monkeypatch.setattr(network, "count_gpus", lambda: 3)
    assert checks(wanted, ranks=3, fabric__backend="nccl")["gpus"].status == "ok"
    check = checks(wanted, ranks=4, fabric__backend="nccl")["gpus"]
    assert (check.status, check.message) == ("fail", "3 GPUs for 4 ranks")
    assert "gpus" not in checks(wanted, ranks=4)


def test_locked_memory_is_asked_for_where_there_is_infiniband(wanted, monkeypatch):
    monkeypatch.setattr(network, "infiniband_interface", lambda: "ib0")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 * 2**20, 8 * 2**20))
    check = checks(wanted)["locked memory"]
    assert (check.status, check.message) == ("warn", "at most 8.0 MiB of memory can be locked")


def test_infiniband_that_must_be_there_and_is_not_fails(wanted, monkeypatch):
    monkeypatch.setattr(network, "active_ports", list)
    monkeypatch.setattr(network, "infiniband_interface", lambda: None)
    assert checks(wanted, fabric__infiniband="always")["infiniband"].status == "fail"
    assert "infiniband" not in checks(wanted)


def test_gid_index_that_no_port_has_fails_by_its_name(wanted, monkeypatch):
    port = network.Port("mlx5_0", "1", "Ethernet", "100 Gb/sec", {0: "IB/RoCE v1", 3: "RoCE v2"})
    monkeypatch.setattr(network, "active_ports", lambda: [port])
    monkeypatch.delenv("NCCL_IB_GID_INDEX", raising=False)
    assert checks(wanted, fabric__gid_index=3)["infiniband"].status == "ok"
    check = checks(wanted, fabric__gid_index=5)["infiniband"]
    assert check.status == "fail" and "fabric.gid_index is 5: mlx5_0 port 1" in check.message
    monkeypatch.setenv("NCCL_IB_GID_INDEX", "0")  # which wins
    check = checks(wanted, fabric__gid_index=3)["infiniband"]
    assert check.status == "fail" and "NCCL_IB_GID_INDEX is 0: GID 0 of" in check.message


@pytest.mark.parametrize(
    ("devices", "status"),
    [("", "fail"), ("mlx5_0", "ok"), ("^mlx5_bond_0", "ok"), ("mlx5_bond_0:1", "fail")],
)
def test_gid_index_counts_on_ports_that_nccl_uses(wanted, monkeypatch, devices, status):
    """A port for management has other GIDs."""
    kinds = {"mlx5_0": {3: "RoCE v2"}, "mlx5_bond_0": {0: "IB/RoCE v1"}}
    ports = [network.Port(name, "1", "Ethernet", "100 Gb/sec", g) for name, g in kinds.items()]
    monkeypatch.setattr(network, "active_ports", lambda: ports)
    wanted = replace(wanted, variables={"NCCL_IB_HCA": devices, "NCCL_IB_GID_INDEX": "3"})
    assert checks(wanted)["infiniband"].status == status


def test_versions_change_with_the_code(monkeypatch, tmp_path):
    before = node_checks.installed_versions()
    assert {"python", "torch", "numpy", "tokenizers", "forge", "forge code"} <= set(before)
    copy = tmp_path / "forge"
    shutil.copytree(Path(forge.__file__).parent, copy)
    monkeypatch.setattr(forge, "__file__", str(copy / "__init__.py"))
    assert node_checks.installed_versions() == before
    with open(copy / "trainer/loss.py", "a") as file:  # in a package, too
        file.write("\n")
    after = node_checks.installed_versions()
    assert {key for key in before if before[key] != after[key]} == {"forge code"}


# --- connections to other nodes ------------------------------------------------------------------


@pytest.fixture
def listener(wanted):
    return node_checks.listen(load_machine(None, {"fabric.interface": "lo"}), "localhost")


def reach(listeners, head="", master="", patience_sec=2):
    return node_checks.reach(listeners, head, master or head, patience_sec)


def test_node_that_listens_is_reached_and_sends_its_time(listener):
    assert listener.address == "127.0.0.1"
    found = reach({"localhost": listener, hostname(): listener}, head="localhost")
    assert list(found) == ["localhost"]
    assert found["localhost"].trouble == ""
    assert abs(found["localhost"].ahead_sec) < 0.5


def test_clock_of_the_other_is_compared_with_ours():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(f"{time.time() - 7:.6f}\n".encode())
        assert node_checks._Peer(ours, 2).clock_ahead() == pytest.approx(-7, abs=0.5)


def test_name_that_does_not_resolve_matters_only_where_the_ranks_look_for_it(listener):
    nameless = "no-such-host.invalid"
    trouble = reach({nameless: listener}, head=nameless)[nameless].trouble
    assert trouble.startswith(f"{nameless} does not resolve: ")
    for given in ({}, {"head": nameless, "master": "127.0.0.1"}):
        assert reach({nameless: listener}, **given)[nameless].trouble == ""


def test_node_of_the_rendezvous_is_reached_at_the_address_that_was_given(listener):
    found = reach({"localhost": listener}, head="localhost", master="127.99.0.1")
    assert found["localhost"].trouble == ""
    with node_checks._Server(("127.0.0.1", 0), node_checks._Echo) as own:  # at this address alone
        threading.Thread(target=own.serve_forever, daemon=True).start()
        at = Listener("127.0.0.1", own.server_address[1])
        found = reach({"localhost": at}, head="localhost", master="127.99.0.1")
        own.shutdown()
    assert found["localhost"].trouble == "cannot connect to 127.99.0.1: Connection refused"


def test_closed_port_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    found = reach({"localhost": Listener("127.0.0.1", port)})
    assert found["localhost"].trouble == "cannot connect to 127.0.0.1: Connection refused"


def test_node_that_accepts_and_sends_nothing_is_reported_within_the_patience():
    """As where small packets arrive and large ones are lost."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        at = Listener("127.0.0.1", silent.getsockname()[1])
        found = reach({"localhost": at}, patience_sec=0.2)
    assert found["localhost"].trouble == "cannot receive from 127.0.0.1: timed out"


def test_interface_without_an_address_cannot_listen():
    machine = load_machine(None, {"fabric.interface": "none0"})
    with pytest.raises(UnfitError, match=r"none0 .* has no IPv4 address"):
        node_checks.listen(machine, "n1")


def test_program_is_looked_for_as_the_ranks_start_it_and_its_directories_are_readable(
    wanted, tmp_path
):
    """A plain name is searched on the PATH alone, a path is relative to the program's directory."""
    (tmp_path / "train.sh").write_text("#!/bin/sh\n")
    (tmp_path / "train.sh").chmod(0o755)
    for command, folder, status in (
        ("sh", tmp_path, "ok"),
        ("./train.sh", tmp_path, "ok"),
        (str(tmp_path / "train.sh"), tmp_path, "ok"),
        ("train.sh", tmp_path, "fail"),
        (".venv/bin/python", tmp_path, "fail"),  # Forge has one in its own directory
        ("no-such-program", tmp_path, "fail"),
        ("sh", tmp_path / "gone", "fail"),
    ):
        reads = ProgramFolders(cwd=str(folder), data="", hub="")
        program = WantedProgram(command, reads, reads)
        found = checks(replace(wanted, data="", program=program))
        assert found["program"].status == status, command
        assert "data" not in found


@pytest.fixture
def staged_inputs(wanted, tmp_path, monkeypatch):
    """A node whose ranks read a copy of the inputs of a program in `disk`."""
    config = inputs.make(tmp_path, monkeypatch)
    shared = InputSet.open(inputs_folder(config.data, config.ids.inputs))
    copy = {"folder": str(tmp_path / "disk"), "digest": shared.digest}
    on_node.copy(kind="inputs", shared=str(shared.folder), wait_sec=10, **copy)
    program = WantedProgram(
        "sh",
        ProgramFolders(cwd=str(tmp_path), data=f"{tmp_path}/disk/data", hub=f"{tmp_path}/disk/hub"),
        ProgramFolders(cwd=str(tmp_path), data=shared.data, hub=shared.hub),
    )
    copy = {"staged": copy["folder"], "digest": shared.digest}
    return replace(wanted, data="", program=program, **copy)


@pytest.mark.parametrize(
    ("lost", "status", "said"),
    [
        ((), "ok", "reads {here}, {here}/disk/data, {here}/disk/hub"),
        (("in",), "ok", "reads {here}, {here}/disk/data, {here}/disk/hub"),
        (
            ("disk",),
            "warn",
            "gone from {here}/disk/data, {here}/disk/hub; ranks read {here}, {here}/in",
        ),
        (("disk", "in"), "fail", "cannot read {here}/in"),
        (("disk/data/train.csv",), "fail", "staged inputs: {here}/disk/data/train.csv is missing"),
    ],
)
def test_program_is_checked_for_what_its_ranks_on_this_node_read(
    staged_inputs, tmp_path, lost, status, said
):
    for name in lost:
        (tmp_path / name).rename(tmp_path / "away" if name == "in" else tmp_path / "lost")
    check = checks(staged_inputs)["program"]
    assert check.status == status
    assert said.format(here=tmp_path) in check.message


def test_staged_inputs_of_another_config_fail(staged_inputs):
    check = checks(replace(staged_inputs, digest="0" * 64))["program"]
    assert (check.status, check.fix) == ("fail", "run: forge stage")
    assert "have digest" in check.message


def test_write_into_the_runs_directory_is_timed_and_leaves_nothing(wanted, monkeypatch):
    folder = Path(wanted.results)
    written = node_checks.write_results(folder)
    assert written.bytes_per_sec and written.bytes_per_sec > 0
    assert f"{folder} is writable, {written.bytes_per_sec / 1e6:,.0f} MB/s" == written.check.message
    assert list(folder.iterdir()) == []
    monkeypatch.setattr(
        node_checks, "PART_OF_FREE", 0.0
    )  # as a small disk, which may be filled by it
    assert node_checks.write_results(folder) == (
        Written(Check("results", "ok", f"{folder} is writable"))
    )
    (folder / "file").touch()
    assert node_checks.write_results(folder / "file").bytes_per_sec is None


def test_node_that_does_not_see_results_is_named_with_the_key(wanted, tmp_path):
    hidden = replace(wanted, results=str(tmp_path / "elsewhere/results"))
    found = {check.name: check for check in node_checks.check_node(hidden).checks}
    assert found["results"].status == "fail"
    assert found["results"].message == f"{hostname()} does not see {hidden.results}"
    assert "stage.results: first_node" in found["results"].fix
    assert not (tmp_path / "elsewhere").exists()


def test_node_that_need_not_see_results_is_checked_for_its_own_disk(wanted, tmp_path):
    machine = load_machine(None, {"stage.folder": str(tmp_path / "disk")})
    blind = replace(wanted, results="", machine=machine)
    found = {check.name: check for check in node_checks.check_node(blind).checks}
    assert found["results"].status == "ok"
    assert str(tmp_path / "disk") in found["results"].message


# --- of a project's plugin ------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Replaces text in the plugin of the page for users; the checks of this node with it."""
    monkeypatch.chdir(tmp_path)

    def checked(old, new):
        plugin = write_documented(tmp_path, "plugins/lab_node.py")
        plugin.write_text(plugin.read_text().replace(old, new))
        plugins = project_plugins.read(["plugins/lab_node.py"])
        with fresh_process():  # as the agent of a node, which has read no config
            return node_checks.own_checks(plugins)

    with fresh_process():
        yield checked


def test_check_of_a_plugin_is_made_on_the_node(own):
    [check] = own('"/scratch"', '"/"')
    assert check == Check("scratch", "ok", "/ is mounted")


def test_check_of_a_plugin_that_fails_says_what_is_wrong_and_what_to_do(own):
    [check] = own('"/scratch"', '"/no/scratch"')
    assert (check.status, check.message) == ("fail", "/no/scratch is not mounted")
    assert check.fix == "leave this node out, and tell the site"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("raise KeyError('SCRATCH')", "KeyError: 'SCRATCH'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("return None", "it gives None, and not a Check"),
        ("return Check('scratch', 'failed', 'no')", "and not a Check"),
    ],
)
def test_check_of_a_plugin_that_does_not_work_fails_by_its_name_and_the_plugins(own, line, message):
    [check] = own("def scratch():", f"def scratch():\n    {line}")
    assert (check.name, check.status) == ("scratch", "fail")
    assert message in check.message
    assert check.fix == "correct it in the plugin lab_node"


def test_check_of_a_plugin_that_hangs_delays_the_others_by_its_limit_alone(own, monkeypatch):
    monkeypatch.setattr(node_checks, "OWN_SEC", 0.5)
    two = "    return [lambda: __import__('time').sleep(3600), scratch]"
    started = time.monotonic()
    late, scratch = own("    return [scratch]", two)
    assert time.monotonic() - started < 5
    assert (late.status, scratch.message) == ("fail", "/scratch is not mounted")
    assert "no answer within 0.5 s" in late.message and "the plugin lab_node" in late.fix


def test_node_without_the_copy_of_a_plugin_imports_nothing(wanted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with fresh_process(), pytest.raises(ConfigError, match="made with the plugin lab_node"):
        node_checks.own_checks({"lab_node": "e" * 64})
    assert node_checks.check_node(wanted).facts.boot  # without plugins none is looked for
