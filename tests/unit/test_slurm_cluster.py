"""Threat: the test cluster is started by root in a directory that every user can write to. What somebody
has put there before must not be followed, removed or believed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.slurm_cluster.cluster import Cluster, base_folder, why_not
from tools.slurm_cluster.machines import ClusterError

REPOSITORY = Path(__file__).parents[2]


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
