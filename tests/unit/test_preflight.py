"""What is wrong with a node must be said before the expensive start, with what to do about it."""

import csv
import json
import os
import re
import resource
import socket
from collections import namedtuple
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from forge import fabric, preflight
from forge.config import Ids, load_config
from forge.errors import ConfigError, UnfitError
from forge.geometry import Geometry
from forge.launch import hostname
from forge.launcher import Record
from forge.ledger import read_lines
from forge.machine import load_machine
from forge.paths import RunPaths, tokens_folder
from forge.preflight import Check

IDS = Ids(tokenizer="a" * 12, tokens="b" * 12)
MODEST = {"preflight.min_free_disk_gib": 0, "preflight.min_free_memory_gib": 0}


@pytest.fixture
def config(tmp_path):
    folders = {"results": str(tmp_path / "results"), "data": str(tmp_path / "data")}
    config = load_config("/dev/null", folders).model_copy(update={"ids": IDS})
    tokens = tokens_folder(config.data, IDS.tokens)
    tokens.mkdir(parents=True)
    (tokens / "manifest.json").write_text("{}")
    RunPaths.of(config).root.mkdir(parents=True)
    return config


@pytest.fixture
def paths(config):
    return RunPaths.of(config)


def checks(config, ranks=1, **limits):
    machine = load_machine(None, {**MODEST, **{k.replace("__", "."): v for k, v in limits.items()}})
    found = preflight.node_checks(config, RunPaths.of(config), machine, Geometry(1, ranks))
    return {check.name: check for check in found}


def problems(found):
    return {check.name: check for check in found.values() if check.status != "ok"}


def result(**changes):
    rank = {"rank": 0, "local_rank": 0, "host": "n1", "device": "cpu", "versions": {"torch": "2"}}
    return {
        "ranks": [rank, {**rank, "rank": 1, "local_rank": 1}],
        "backend": "gloo",
        "interface": "eth7",
        "all_reduce_right": True,
        "latency_us": 40.2,
        "bus_gb_per_sec": 3.456,
        **changes,
    }


def rank_checks(**changes):
    record = Record("completed", result=result(**changes))
    return {check.name: check for check in preflight.rank_checks(record, Geometry(1, 2))}


# --- the node -------------------------------------------------------------------------------------


def test_fit_node_passes_every_check(config):
    found = checks(config, preflight__min_open_files=0)
    assert [check.name for check in found.values() if check.status == "fail"] == []
    assert list(found) == [
        *("name", "project", "packages", "data", "results"),
        *("disk", "memory", "open files", "cores", "interface"),
    ]


def test_host_name_that_does_not_resolve_only_warns(config, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    check = checks(config)["name"]
    assert check.status == "warn"
    assert "no-such-host.invalid does not resolve" in check.message
    assert check.fix == "add no-such-host.invalid to /etc/hosts"


def test_unreadable_project_fails(config, monkeypatch):
    real = os.access
    monkeypatch.setattr(os, "access", lambda p, m: Path(p).name != "rank.py" and real(p, m))
    check = problems(checks(config))["project"]
    assert (check.status, check.fix) == ("fail", "check its file system and mode")
    assert "cannot read" in check.message


def test_missing_package_is_named(config, monkeypatch):
    def version(name):
        if name == "blake3":
            raise PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(preflight, "version", version)
    check = problems(checks(config))["packages"]
    assert check == Check("packages", "fail", "package blake3 is missing", "run: make setup")


def test_missing_shards_are_named(config):
    manifest = tokens_folder(config.data, IDS.tokens) / "manifest.json"
    manifest.unlink()
    check = problems(checks(config))["data"]
    assert check == Check("data", "fail", f"cannot read {manifest}", "run: forge tokenize")


def test_results_that_cannot_be_written_fail(config, paths):
    # A file in the way: unlike a mode, it stops root as well.
    machine = load_machine(None, MODEST)
    (paths.root / "file").touch()
    inside = RunPaths(paths.root / "file")
    found = preflight.node_checks(config, inside, machine, Geometry())
    check = next(check for check in found if check.name == "results")
    assert check.status == "fail"
    assert str(inside.root) in check.message
    assert check.fix


@pytest.mark.parametrize(
    ("key", "name", "unit", "fix"),
    [
        ("preflight__min_free_disk_gib", "disk", "GiB free in", "point `results` to another disk"),
        ("preflight__min_free_memory_gib", "memory", "GiB available", "use fewer ranks"),
        ("preflight__min_open_files", "open files", "open files allowed", "ulimit -n 4096"),
    ],
)
def test_too_little_is_told_with_both_numbers(config, key, name, unit, fix):
    check = problems(checks(config, **{key: 10**9}))[name]
    assert check.status == "fail"
    assert re.fullmatch(rf"[\d,.]+ {unit}.*, 1e\+09 needed", check.message), check.message
    assert fix in check.fix


def test_memory_is_counted_per_rank(config, monkeypatch):
    memory = SimpleNamespace(available=3 * 2**30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    limits = {"preflight__min_free_memory_gib": 2}
    assert checks(config, ranks=1, **limits)["memory"].status == "ok"
    assert checks(config, ranks=2, **limits)["memory"].message == "3.0 GiB available, 4 needed"


def test_open_files_are_the_soft_limit(config, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (255, 4096))
    assert checks(config)["open files"].message == "255.0 open files allowed, 256 needed"
    assert checks(config)["open files"].status == "fail"


def test_more_ranks_than_cores_only_warns(config, monkeypatch):
    monkeypatch.setattr(fabric, "available_cores", lambda: 2)
    check = checks(config, ranks=3)["cores"]
    assert (check.status, check.message) == ("warn", "2 cores for 3 ranks")
    assert "fewer ranks" in check.fix


@pytest.mark.parametrize(("name", "state"), [("ib7", "not there"), ("eth1", "down")])
def test_interface_that_cannot_serve_fails_and_names_those_that_can(
    config, monkeypatch, name, state
):
    Stats = namedtuple("Stats", "isup")
    there = {"lo": Stats(True), "eth1": Stats(False), "eth0": Stats(True)}
    monkeypatch.setattr(psutil, "net_if_stats", lambda: there)
    assert checks(config, fabric__interface=name)["interface"] == Check(
        "interface",
        "fail",
        f"{name} (fabric.interface) is {state}",
        "set fabric.interface to one that is up: eth0, lo",
    )


# --- one line for the node ------------------------------------------------------------------------


def test_line_of_a_fit_node(config):
    line = preflight.node_line(list(checks(config, preflight__min_open_files=0).values()))
    pattern = (
        rf"NODE {re.escape(hostname())} OK PY 3\.\d+\.\d+ torch 2\.\S+"
        r" proj=ok pkgs=ok data=ok disk=ok"
    )
    assert re.fullmatch(pattern, line), line


def test_line_of_an_unfit_node_says_which_part_failed(config, monkeypatch):
    monkeypatch.setattr(preflight, "hostname", lambda: "n7")
    monkeypatch.setattr(preflight.platform, "python_version", lambda: "3.11.9")
    found = [
        Check("project", "ok", ""),
        Check("packages", "fail", "package torch is missing", "run: make setup"),
        Check("data", "warn", ""),
    ]
    assert preflight.node_line(found) == "NODE n7 FAIL PY 3.11.9 proj=ok pkgs=fail data=warn"


# --- its ranks ------------------------------------------------------------------------------------


def test_ranks_that_agree_pass():
    found = rank_checks()
    assert problems(found) == {}
    assert found["mapping"].message == "world of 2: 0=n1:cpu, 1=n1:cpu"
    assert found["rendezvous"].message == "gloo over eth7"
    assert found["all-reduce"].message == "40 µs, bus 3.46 GB/s"


def test_wrong_sum_fails():
    check = problems(rank_checks(all_reduce_right=False))["all-reduce"]
    assert (check.status, check.message) == ("fail", "the sum over ranks is wrong")
    assert "leave this node out" in check.fix


def test_ranks_with_other_versions_are_named():
    ranks = result()["ranks"]
    ranks[1] = {**ranks[1], "versions": {"torch": "1"}}
    assert problems(rank_checks(ranks=ranks)) == {
        "versions": Check(
            "versions",
            "fail",
            "ranks [1] have other versions than rank 0",
            "use one environment on all nodes",
        )
    }


def test_two_processes_of_one_rank_fail_and_the_map_is_shown():
    ranks = result()["ranks"]
    ranks[1] = {**ranks[1], "rank": 0}
    check = problems(rank_checks(ranks=ranks))["mapping"]
    assert (check.status, check.message) == ("fail", "world of 2: 0=n1:cpu, 0=n1:cpu")
    assert "--ranks-per-node" in check.fix


# --- the verb -------------------------------------------------------------------------------------


def verb(config, monkeypatch, record=None, ranks=2, **limits):
    """The verb with ranks that end with `record`; how many times they were started."""
    starts = []

    def run_ranks(*_, **options):
        starts.append(options)
        return record or Record("completed", result=result())

    monkeypatch.setattr(preflight, "run_ranks", run_ranks)
    keys = {**MODEST, "launcher": "torchrun", "preflight.min_open_files": 0, **limits}
    try:
        preflight.preflight(config, load_machine(None, keys), Geometry(1, ranks))
    finally:
        assert len(starts) <= 1
    return starts


def table(paths):
    with open(paths.preflight_table, newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def test_pass_is_written_for_people_machines_and_the_workflow(config, paths, monkeypatch):
    starts = verb(config, monkeypatch, **{"preflight.deadline_sec": 7})
    assert starts == [{"deadline_sec": 7}]
    summary = json.loads(paths.preflight.read_text())
    assert summary["status"] == "ok"
    assert summary["ranks"]["world_size"] == 2
    assert [row["status"] for row in table(paths) if row["status"] == "fail"] == []
    assert [row["name"] for row in table(paths) if row["where"] == "ranks"] == [
        *("mapping", "rendezvous", "versions", "all-reduce"),
    ]
    assert json.loads(paths.preflight_pass.read_text()) == {"status": "ok", "host": hostname()}
    assert len(list(paths.logs.glob("preflight.local.*.json"))) == 1


def test_unfit_node_starts_no_ranks_and_still_leaves_its_table(config, paths, monkeypatch):
    with pytest.raises(UnfitError, match=r"disk: .* needed") as caught:
        verb(config, monkeypatch, **{"preflight.min_free_disk_gib": 1e9})
    assert str(paths.preflight_table) in caught.value.fix
    assert [row["name"] for row in table(paths) if row["status"] == "fail"] == ["disk"]
    summary = json.loads(paths.preflight.read_text())
    assert (summary["status"], summary["ranks"]["checks"]) == ("failed", [])
    event = read_lines(paths.events)[-1]
    assert (event["event"], event["status"], event["failed"]) == ("preflight", "failed", ["disk"])


def test_failure_takes_back_an_earlier_pass(config, paths, monkeypatch):
    verb(config, monkeypatch)
    with pytest.raises(UnfitError):
        verb(config, monkeypatch, record=Record("completed", result=result(all_reduce_right=False)))
    assert not paths.preflight_pass.exists()
    assert json.loads(paths.preflight.read_text())["status"] == "failed"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            Record("lost", message="ranks without a record: 1 of 2"),
            "not through within 90 s: ranks",
        ),
        (Record("failed", 1, 69, message="no route to host"), "rendezvous: no route to host"),
    ],
)
def test_ranks_that_do_not_meet_fail_with_where_to_look(
    config, paths, monkeypatch, record, message
):
    with pytest.raises(UnfitError, match=message) as caught:
        verb(config, monkeypatch, record=record)
    assert str(paths.logs) in caught.value.fix


def test_geometry_that_the_launcher_cannot_give_is_refused_first(config, monkeypatch):
    with pytest.raises(ConfigError, match="3 ranks"):
        verb(config, monkeypatch, ranks=3, **{"launcher": "process"})
