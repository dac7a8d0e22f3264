"""The verb `preflight`: is this node fit, do the ranks meet and talk? Said before training starts."""

from __future__ import annotations

import csv
import os
import platform
import resource
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import psutil

from forge import fabric, ledger
from forge.artefacts import freeze
from forge.config import Config
from forge.errors import UnfitError
from forge.geometry import Geometry, check_geometry
from forge.launch import hostname
from forge.launcher import Record, run_ranks
from forge.lease import lease
from forge.machine import Machine
from forge.manifest import atomic_open, write_json
from forge.paths import RunPaths, tokens_folder
from forge.progress import say

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """What one check found, and what to do about it."""

    name: str
    status: Status
    message: str
    fix: str = ""


def preflight(config: Config, machine: Machine, geometry: Geometry) -> Path:
    """Check this node and its ranks; the path of the passed `.allocation/preflight.json`.

    Writes preflight.json and preflight.tsv either way. Raises UnfitError that names what failed.
    Ends within preflight.deadline_sec plus seconds.
    """
    started = time.time()
    config = freeze(config)
    check_geometry(machine, geometry, config)
    paths = RunPaths.of(config)
    with lease(paths.root, "preflight"):
        paths.preflight_pass.unlink(missing_ok=True)  # an earlier pass says nothing about today
        node = list(node_checks(config, paths, machine, geometry))
        # Ranks on a node that is unfit would only fail in a less readable way.
        ranks = [] if _failed(node) else _check_ranks(paths, machine, geometry)
        failed = _failed(node + ranks)
        summary = {
            "status": "failed" if failed else "ok",
            "nodes": [
                {
                    "node": hostname(),
                    "line": node_line(node),
                    "checks": [asdict(check) for check in node],
                }
            ],
            "ranks": {
                "world_size": geometry.world_size,
                "checks": [asdict(check) for check in ranks],
            },
        }
        _write(paths, summary)
        _tell(node, ranks)
        seconds = round(time.time() - started, 3)
        ledger.record(
            paths.events,
            "preflight",
            seconds=seconds,
            status=summary["status"],
            failed=[check.name for check in failed],
        )
        if failed:
            raise UnfitError(
                f"{hostname()} is not fit to train {config.run}: "
                + "; ".join(f"{check.name}: {check.message}" for check in failed),
                fix="; ".join(dict.fromkeys(check.fix for check in failed if check.fix))
                + f"   (all checks: {paths.preflight_table})",
            )
        write_json(paths.preflight_pass, {"status": "ok", "host": hostname()})
    return paths.preflight_pass


def _failed(checks: list[Check]) -> list[Check]:
    return [check for check in checks if check.status == "fail"]


# --- the node ------------------------------------------------------------------------------------


def node_checks(
    config: Config, paths: RunPaths, machine: Machine, geometry: Geometry
) -> Iterator[Check]:
    """Everything that can be said of this node without torch, in milliseconds."""
    limits = machine.preflight
    yield _name_resolves()
    yield _project_visible()
    yield _packages()
    yield _data_visible(config)
    yield _results_writable(paths)
    yield _at_least(
        "disk",
        shutil.disk_usage(paths.root).free / 2**30,
        limits.min_free_disk_gib,
        f"GiB free in {paths.root}",
        "free space there, or point `results` to another disk",
    )
    yield _at_least(
        "memory",
        psutil.virtual_memory().available / 2**30,
        limits.min_free_memory_gib * geometry.ranks_per_node,
        "GiB available",
        "end other programs, use fewer ranks, or ask for more memory",
    )
    yield _at_least(
        "open files",
        resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        limits.min_open_files,
        "open files allowed",
        "ulimit -n 4096",
    )
    yield _cores(geometry)
    yield _interface(machine)


def _name_resolves() -> Check:
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
    except OSError as err:
        # Ranks of one node meet on the loopback address, so this only warns.
        fix = f"add {name} to /etc/hosts"
        return Check("name", "warn", f"{name} does not resolve: {err}", fix)
    return Check("name", "ok", f"{name} is {address}")


def _project_visible() -> Check:
    folder = Path(__file__).parent
    if not os.access(folder / "rank.py", os.R_OK):
        return Check("project", "fail", f"cannot read {folder}", "check its file system and mode")
    return Check("project", "ok", f"code in {folder}")


def _packages() -> Check:
    try:
        found = {name: version(name) for name in ("torch", "numpy", "tokenizers", "blake3")}
    except PackageNotFoundError as err:
        return Check("packages", "fail", f"package {err.name} is missing", "run: make setup")
    text = ", ".join(f"{name} {number}" for name, number in found.items())
    return Check("packages", "ok", f"Python {platform.python_version()}, {text}")


def _data_visible(config: Config) -> Check:
    assert config.ids
    folder = tokens_folder(config.data, config.ids.tokens)
    if not os.access(folder / "manifest.json", os.R_OK):
        return Check("data", "fail", f"cannot read {folder}/manifest.json", "run: forge tokenize")
    return Check("data", "ok", f"shards in {folder}")


def _results_writable(paths: RunPaths) -> Check:
    probe = paths.root / f".writable-{os.getpid()}"
    try:
        with atomic_open(probe) as file:
            file.write(b"x")
        probe.unlink()
    except UnfitError as err:
        return Check("results", "fail", err.what, err.fix)
    return Check("results", "ok", f"{paths.root} is writable")


def _at_least(name: str, found: float, needed: float, unit: str, fix: str) -> Check:
    message = f"{found:,.1f} {unit}, {needed:g} needed"
    return Check(name, "ok", message) if found >= needed else Check(name, "fail", message, fix)


def _cores(geometry: Geometry) -> Check:
    cores, ranks = fabric.available_cores(), geometry.ranks_per_node
    message = f"{cores} cores for {ranks} ranks"
    if cores < ranks:
        return Check("cores", "warn", message, "use fewer ranks: they share cores and run slower")
    return Check("cores", "ok", message)


def _interface(machine: Machine) -> Check:
    wanted = machine.fabric.interface
    there = psutil.net_if_stats()
    if wanted and not (wanted in there and there[wanted].isup):
        up = ", ".join(sorted(name for name, state in there.items() if state.isup))
        return Check(
            "interface",
            "fail",
            f"{wanted} (fabric.interface) is {'down' if wanted in there else 'not there'}",
            f"set fabric.interface to one that is up: {up}",
        )
    chosen = wanted or fabric.infiniband_interface() or fabric.interface_towards("127.0.0.1")
    return Check("interface", "ok", f"{chosen}")


def node_line(checks: list[Check]) -> str:
    """One line for the node, as people of clusters know it."""
    by_name = {check.name: check.status for check in checks}
    state = "FAIL" if _failed(checks) else "OK"
    parts = [f"NODE {hostname()} {state} PY {platform.python_version()}"]
    if by_name.get("packages") == "ok":
        parts.append(f"torch {version('torch')}")
    shown = (("proj", "project"), ("pkgs", "packages"), ("data", "data"), ("disk", "disk"))
    parts += [f"{short}={by_name[name]}" for short, name in shown if name in by_name]
    return " ".join(parts)


# --- its ranks -----------------------------------------------------------------------------------


def _check_ranks(paths: RunPaths, machine: Machine, geometry: Geometry) -> list[Check]:
    deadline = machine.preflight.deadline_sec
    record = run_ranks("preflight", paths, machine, geometry, deadline_sec=deadline)
    if record.status != "completed":
        fix = "read the ranks' logs in " + str(paths.logs)
        what = f"not through within {deadline:g} s: " if record.status == "lost" else ""
        return [Check("rendezvous", "fail", f"{what}{record.message}", fix)]
    return list(rank_checks(record, geometry))


def rank_checks(record: Record, geometry: Geometry) -> Iterator[Check]:
    """Checks on what the ranks found together; `record` is rank 0's."""
    result = record.result
    ranks: list[dict[str, Any]] = result["ranks"]
    world = geometry.world_size
    where = ", ".join(f"{r['rank']}={r['host']}:{r['device']}" for r in ranks[:16])
    numbers = sorted(rank["rank"] for rank in ranks)
    mapped = numbers == list(range(world))
    yield Check(
        "mapping",
        "ok" if mapped else "fail",
        f"world of {world}: {where}",
        "" if mapped else "give the --nodes and --ranks-per-node that the launcher starts",
    )
    yield Check("rendezvous", "ok", f"{result['backend']} over {result['interface'] or 'any'}")
    differing = [rank["rank"] for rank in ranks if rank["versions"] != ranks[0]["versions"]]
    if differing:
        message = f"ranks {differing} have other versions than rank 0"
        yield Check("versions", "fail", message, "use one environment on all nodes")
    else:
        yield Check("versions", "ok", "equal on all ranks")
    right = result["all_reduce_right"]
    figures = f"{result['latency_us']:.0f} µs, bus {result['bus_gb_per_sec']:.2f} GB/s"
    yield Check(
        "all-reduce",
        "ok" if right else "fail",
        figures if right else "the sum over ranks is wrong",
        "" if right else "the interface or GPU link corrupts data: leave this node out",
    )


# --- telling it ----------------------------------------------------------------------------------


def _write(paths: RunPaths, summary: dict[str, Any]) -> None:
    """The last result under its fixed names, and one that stays, per start."""
    started = time.strftime("%Y%m%dT%H%M%S")
    write_json(paths.preflight, summary)
    write_json(paths.logs / f"preflight.local.{started}.json", summary)
    rows = [
        [place, *check.values()]
        for place, checks in (
            *((node["node"], node["checks"]) for node in summary["nodes"]),
            ("ranks", summary["ranks"]["checks"]),
        )
        for check in checks
    ]
    with atomic_open(paths.preflight_table, "w") as file:
        table = csv.writer(file, delimiter="\t", lineterminator="\n")
        table.writerow(["where", "name", "status", "message", "fix"])
        table.writerows(rows)


def _tell(node: list[Check], ranks: list[Check]) -> None:
    say(node_line(node))
    by_name = {check.name: check for check in ranks}
    if "all-reduce" in by_name:
        say(f"RANKS {by_name['mapping'].message}; all-reduce {by_name['all-reduce'].message}")
    for check in (*node, *ranks):
        if check.status != "ok":
            say(f"  {check.status}: {check.name}: {check.message}" + _fix(check))


def _fix(check: Check) -> str:
    return f"   fix: {check.fix}" if check.fix else ""
