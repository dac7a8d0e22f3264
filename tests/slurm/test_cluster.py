"""The cluster itself: if one of these fails, believe no other test on Slurm."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.slurm_cluster.cluster import REPOSITORY, Cluster
from tools.slurm_cluster.machines import wait_until
from tools.slurm_cluster.settings import Settings, slurm_conf
from tools.slurm_cluster.temporary import _remove_dead, locked

pytestmark = pytest.mark.tools

Nodes = Callable[[int], list[str]]

MARK = "FORGE_TESTS"  # of tests/support/live_run.py

# srun -v tells when a node has answered that its tasks run.
SLEEPER = """#!/bin/bash
srun -v --kill-on-bad-exit=1 sleep 600
"""

# The handler is there before the word: a signal that comes right after it is caught.
INTERRUPTED = """
import time
try:
    print("up", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    raise SystemExit(7)
"""


RECEIVER = """
import socket, sys
server = socket.create_server(("", 7000))
print("up", flush=True)
connection, _ = server.accept()
connection.settimeout(2)
missing = int(sys.argv[1])
while missing:
    missing -= len(connection.recv(1 << 16))
connection.sendall(b"all")
"""
SENDER = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 7000), timeout=2)
connection.sendall(bytes(int(sys.argv[2])))
assert connection.recv(3)
"""


def reaches(cluster: Cluster, source: str, target: str, num_bytes: int = 100) -> bool:
    """Whether so many bytes arrive, and an answer comes back, none waiting for 2 s."""
    receiver = cluster.popen("python", "-c", RECEIVER, str(num_bytes), machine=target)
    assert receiver.stdout and receiver.stdout.readline() == "up\n"
    sender = ("python", "-c", SENDER, target, str(num_bytes))
    done = cluster.run(*sender, machine=source, check=False)
    receiver.kill_group()
    return done.returncode == 0


def test_machines_and_jobs_carry_no_mark_of_the_tests_that_started_them(
    cluster: Cluster, nodes: Nodes, shared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [name] = nodes(1)
    monkeypatch.setenv(MARK, "those who clean up kill what carries this")
    cluster.repair([name])
    own = cluster.folder / "machines" / name / "pid"
    assert MARK not in Path(f"/proc/{own.read_text().strip()}/environ").read_text()
    said = shared_folder / "out"
    job = cluster.submit(f"--output={said}", "-w", name, "--wrap", "env", cwd=shared_folder)
    cluster.wait_for_state(job, "COMPLETED")
    assert "SLURM_JOB_ID" in said.read_text() and MARK not in said.read_text()


def test_each_node_has_its_own_name_address_tmp_and_two_gpus(
    cluster: Cluster, nodes: Nodes
) -> None:
    names = nodes(3)
    show = (
        "echo $(hostname) $(hostname -i) $CUDA_VISIBLE_DEVICES; test ! -e /tmp/mark; : >/tmp/mark"
    )
    step = ["srun", "-N3", "-w", ",".join(names), "--gres=gpu:2", "bash", "-ec", show]
    assert sorted(cluster.run(*step).stdout.splitlines()) == [
        f"{name} {cluster.settings.address(name)} 0,1" for name in names
    ]


def test_jobs_are_accounted_for(cluster: Cluster, nodes: Nodes) -> None:
    (name,) = nodes(1)
    job = cluster.submit("-w", name, "--wrap", "exit 3", "--output=/dev/null")
    cluster.wait_for_state(job, "FAILED")
    sacct = ("sacct", "-nPX", "-j", job, "-o", "State,ExitCode")
    wait_until(lambda: cluster.run(*sacct).stdout == "FAILED|3:0\n", 20, "accounted", every=0.2)


def test_job_of_a_node_without_power_starts_again(
    cluster: Cluster, nodes: Nodes, shared_folder: Path
) -> None:
    names = nodes(2)
    script = shared_folder / "job.sh"
    script.write_text(SLEEPER)
    where = ("-N2", "-w", ",".join(names), f"--output={shared_folder}/%j.log")
    job = cluster.submit("--requeue", *where, script)
    # Before srun knows that its step runs everywhere, the job fails instead: srun cannot begin.
    log = shared_folder / f"{job}.log"
    begun = [f"Node {name}, 1 tasks started" for name in names]
    wait_until(
        lambda: log.exists() and all(line in log.read_text() for line in begun),
        60,
        f"a step on {names}",
        lambda: log.read_text() if log.exists() else "no output",
    )
    cluster.power_cut(names[1])
    cluster.wait_for_state(job, "PENDING", timeout=90)
    cluster.boot(names[1])
    assert cluster.wait_for_state(job, "RUNNING", timeout=60)["Restarts"] == "1"


def test_cut_cable_isolates_a_node_that_computes_on(cluster: Cluster, nodes: Nodes) -> None:
    one, other = nodes(2)
    cluster.cable_cut(one)
    assert not reaches(cluster, "ctl", one)
    assert not reaches(cluster, one, other)
    assert reaches(cluster, "ctl", other)
    cluster.cable_plug(one)
    wait_until(lambda: reaches(cluster, one, other), 10, "reached after the plug")


def test_blocked_pair_still_reaches_the_others(cluster: Cluster, nodes: Nodes) -> None:
    one, other, third = nodes(3)
    cluster.block_pair(one, other)
    assert not reaches(cluster, one, other)
    assert not reaches(cluster, other, one)
    assert reaches(cluster, one, third)
    assert reaches(cluster, other, "ctl")
    cluster.unblock_pair(one, other)
    assert reaches(cluster, one, other)


def test_large_packets_vanish_on_a_small_mtu(cluster: Cluster, nodes: Nodes) -> None:
    one, other = nodes(2)
    cluster.small_mtu(one)
    assert reaches(cluster, other, one, num_bytes=200)
    assert not reaches(cluster, other, one, num_bytes=20_000)
    assert not reaches(cluster, one, other, num_bytes=20_000)
    cluster.full_speed(one)
    assert reaches(cluster, other, one, num_bytes=20_000)


def test_slow_link_carries_what_it_says(cluster: Cluster, nodes: Nodes) -> None:
    one, other = nodes(2)
    cluster.slow_link(one, mbit=80)
    start = time.monotonic()
    assert reaches(cluster, other, one, num_bytes=10_000_000)
    assert 0.8 < time.monotonic() - start < 2  # 1 s for 80 Mbit, and two Pythons


def test_full_tmp_and_hidden_folder_are_seen_by_jobs(cluster: Cluster, nodes: Nodes) -> None:
    one, other = nodes(2)
    cluster.fill_tmp(one, leave_mib=2)
    cluster.hide(other, REPOSITORY)
    step = ("srun", "--chdir=/", "-w")
    full = cluster.run(
        *step, one, "dd", "if=/dev/zero", "of=/tmp/x", "bs=3M", "count=1", check=False
    )
    assert "No space left on device" in full.stderr
    assert not cluster.run(*step, other, "ls", REPOSITORY).stdout
    cluster.repair([one, other])
    assert cluster.run(*step, other, "ls", REPOSITORY / "Makefile").stdout
    cluster.run(*step, one, "dd", "if=/dev/zero", "of=/tmp/x", "bs=3M", "count=1")


def test_interface_can_have_another_name(cluster: Cluster, nodes: Nodes) -> None:
    one, other = nodes(2)
    cluster.power_cut(one)
    cluster.boot(one, interface="eno1")
    assert (cluster.interface(one), cluster.interface(other)) == ("eno1", "eth0")
    cluster.wait_until_idle([one])
    assert cluster.run("srun", "-w", one, "hostname").stdout.strip() == one


def test_command_in_a_machine_gets_signals_and_is_killed_when_late(cluster: Cluster) -> None:
    process = cluster.popen("python", "-c", INTERRUPTED)
    assert process.stdout and process.stdout.readline() == "up\n"
    process.press_ctrl_c()
    assert process.wait(10) == 7
    with pytest.raises(subprocess.TimeoutExpired, match="sleep"):
        cluster.run("sleep", "61.75", timeout=0.3)
    assert cluster.run("pgrep", "-f", "sleep 61.75", check=False).returncode == 1


def test_daemons_restart_and_the_queue_survives(exclusive_cluster: Cluster) -> None:
    job = exclusive_cluster.submit("--hold", "--wrap", "true", "--output=/dev/null")
    exclusive_cluster.stop_daemon("slurmdbd")
    assert exclusive_cluster.run("sacct", check=False).returncode
    exclusive_cluster.start_daemon("slurmdbd")
    exclusive_cluster.run("sacct")
    exclusive_cluster.restart_slurmctld()
    assert exclusive_cluster.job(job)["JobState"] == "PENDING"


def test_configuration_changes_and_is_restored(exclusive_cluster: Cluster) -> None:
    def timeout() -> str:
        config = exclusive_cluster.run("scontrol", "show", "config").stdout
        return next(line for line in config.splitlines() if line.startswith("SlurmdTimeout"))

    exclusive_cluster.configure(SlurmdTimeout=300)
    assert timeout().endswith(" 300 sec")
    exclusive_cluster.configure()
    assert timeout().endswith(" 10 sec")


# ------------------------------------------------------------------ no cluster needed


def test_only_clusters_of_dead_processes_are_removed(tmp_path: Path) -> None:
    for run in ("dead", "alive"):
        (tmp_path / f"tests-{run}").mkdir()
    with locked(tmp_path / "tests-alive/members.lock"):
        _remove_dead(tmp_path)
        assert [folder.name for folder in tmp_path.iterdir()] == ["tests-alive"]


def test_changed_keys_replace_those_of_slurm_conf(tmp_path: Path) -> None:
    text = slurm_conf(Settings(nodes=2), tmp_path, {"SlurmdTimeout": 300})
    assert [line for line in text.splitlines() if "SlurmdTimeout" in line] == ["SlurmdTimeout=300"]


@pytest.mark.parametrize("wrong", [{"nodes": 13}, {"nodes": 2, "interfaces": {"node03": "eno1"}}])
def test_impossible_cluster_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"1 to 12 nodes, not 13|\['node03'\]"):
        Settings(**wrong)  # type: ignore[arg-type]
