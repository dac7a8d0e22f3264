"""Threat: the test cluster is started by root in a directory that every user can write to. What somebody
has put there before must not be followed, removed or believed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.repository import REPOSITORY

from tools.slurm_cluster.cluster import Cluster, base_folder, why_not
from tools.slurm_cluster.machines import ClusterError
from tools.slurm_cluster.settings import NodeKind, Settings, other_files, slurm_conf

pytestmark = pytest.mark.tools


@pytest.fixture
def victim(tmp_path):
    folder = tmp_path / "victim" / "cluster"
    (folder / "etc").mkdir(parents=True)
    (folder / "etc/passwd").write_text("root")
    return folder


def plant(victim, tmp_path, which):
    """The planted directory for clusters: a link, one with a link in it, or one open to all."""
    base = tmp_path / "forge-slurm"
    if which == "link":
        base.symlink_to(victim.parent)
    else:
        base.mkdir()
        (base / "cluster").symlink_to(victim)
        base.chmod(0o777 if which == "open" else 0o755)
    return base


@pytest.mark.parametrize("which", ["link", "link inside", "open"])
@pytest.mark.skipif(why_not() is not None, reason="no cluster can run here")
def test_start_of_a_cluster_follows_no_planted_link(tmp_path, victim, which):
    base = plant(victim, tmp_path, which)
    done = subprocess.run(
        [sys.executable, "-m", "tools.slurm_cluster", "up"],
        env={**os.environ, "FORGE_SLURM_DIR": str(base)},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.startswith(f"{base}") and "remove it, or set FORGE_SLURM_DIR" in done.stderr
    assert [path.name for path in victim.rglob("*")] == ["etc", "passwd"]


def test_folder_of_a_cluster_is_made_for_this_user_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("FORGE_SLURM_DIR", str(tmp_path / "new/base"))
    cluster = Cluster(base_folder() / "cluster")
    for folder in (base_folder(), cluster.folder):
        assert folder.stat().st_mode & 0o777 == 0o700


def test_folder_that_others_may_write_to_is_refused(tmp_path):
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster").chmod(0o770)
    with pytest.raises(ClusterError, match="cluster has mode 770: others may write there"):
        Cluster(tmp_path / "cluster")


def in_full(text):
    """Lines of slurm.conf without comments, in a set, each with the values of DEFAULT lines above it."""
    defaults, lines = {"NodeName": {}, "PartitionName": {}}, set()
    for line in filter(None, (line.partition("#")[0].strip() for line in text.splitlines())):
        pairs = dict(re.findall(r"(\w+)=(\S+)", line))
        kind, name = next(iter(pairs.items()))
        if name == "DEFAULT":
            defaults[kind] |= pairs
        else:
            lines.add(frozenset({**defaults.get(kind, {}), **pairs}.items()))
    return lines


def test_slurm_conf_of_the_default_cluster_has_the_recorded_content():
    recorded = in_full((REPOSITORY / "tests/unit/slurm.conf").read_text())
    assert len(recorded) > 40
    assert in_full(slurm_conf(Settings(), Path("/F"))) == recorded


def test_gpus_of_a_node_are_devices_of_its_own_types(tmp_path):
    kinds = (NodeKind(gpus=(("h100", 4), ("1g.10gb", 7))), NodeKind(gpus=()))
    settings = Settings(nodes=3, kinds=kinds)
    assert other_files(settings, Path("/F"))["gres.conf"] == (
        "NodeName=node01 Name=gpu Type=h100 File=/F/gpus/nvidia[0-3]\n"
        "NodeName=node01 Name=gpu Type=1g.10gb File=/F/gpus/nvidia[4-10]\n"
    )
    lines = slurm_conf(settings, Path("/F")).splitlines()
    gres = {m[1]: m[2] for line in lines if (m := re.match(r"NodeName=(\S+) .*Gres=(\S+)", line))}
    assert gres == {"node01": "gpu:h100:4,gpu:1g.10gb:7"}


def test_impossible_shape_of_a_node_is_refused():
    with pytest.raises(ValueError, match="8 CPUs are no multiple of 3 sockets x 1 threads a core"):
        NodeKind(cpus=8, sockets=3)
