"""Kernels are code that every launch of a run executes: they survive a requeue, in a place that nobody
else writes, and a node that cannot use that place still trains."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from forge.core import provenance
from forge.core.errors import UnfitError
from forge.core.paths import kernels_folder
from forge.launch.kernel_cache import VARIABLE, kernel_cache, open_kernel_cache

X86 = "processor\t: {n}\nmodel name\t: A CPU\ncpu MHz\t\t: {mhz}\nflags\t\t: fpu {flags}\n\n"


@pytest.fixture
def node_local(monkeypatch, tmp_path):
    """The disk of this node."""
    for name in ("SLURM_TMPDIR", VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "node"))
    return tmp_path / "node"


def own_of(node_local):
    return node_local / f"forge-{os.getuid()}/kernels" / provenance.cpu_id()


def training(spec, folder):
    return spec.model_copy(update={"kernels": str(folder)})


def test_kernels_of_a_run_that_trains_are_in_the_project_and_not_beside_its_results(spec):
    folder = kernels_folder(Path("/elsewhere/results/base"))
    assert folder.parts[:3] == (".snakemake", "forge", "kernels")
    value = Path(kernel_cache(training(spec, folder)).value)
    assert value.parent == folder


def test_runs_of_one_name_in_two_directories_share_no_kernels():
    assert kernels_folder(Path("/a/base")) != kernels_folder(Path("/b/base"))


def test_kernels_of_another_task_stay_on_the_node(spec, node_local):
    assert kernel_cache(spec).value == str(own_of(node_local))


def test_each_kind_of_cpu_has_its_own_kernels_whatever_its_clock_says(monkeypatch):
    def id_of(text):
        monkeypatch.setattr(Path, "exists", lambda path: True)
        monkeypatch.setattr(Path, "read_text", lambda path: text)
        return provenance.cpu_id()

    one = id_of(X86.format(n=0, mhz=2000, flags="avx512f"))
    assert id_of(X86.format(n=0, mhz=3100, flags="avx512f")) == one
    assert id_of(X86.format(n=0, mhz=2000, flags="avx2")) != one


def test_directory_of_the_project_is_made_and_used(monkeypatch, tmp_path, node_local, capsys):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "project/kernels"))
    open_kernel_cache()
    assert os.environ[VARIABLE] == str(tmp_path / "project/kernels")
    assert list((tmp_path / "project/kernels").iterdir()) == []
    assert not node_local.exists()
    assert capsys.readouterr().err == ""


def test_node_that_cannot_write_there_takes_its_own_disk(monkeypatch, tmp_path, node_local, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file/kernels"))
    open_kernel_cache()
    assert os.environ[VARIABLE] == str(own_of(node_local))
    assert (node_local / f"forge-{os.getuid()}").stat().st_mode & 0o777 == 0o700
    assert f"{tmp_path}/file/kernels cannot be used on this node" in capsys.readouterr().err


def test_file_system_without_locks_is_not_used(monkeypatch, tmp_path, node_local, capsys):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "kernels"))
    open_kernel_cache()
    assert os.environ[VARIABLE] == str(own_of(node_local))
    assert "No locks available" in capsys.readouterr().err


def test_directory_that_another_user_has_made_on_the_node_is_refused(node_local, tmp_path):
    node_local.mkdir()
    planted = tmp_path / "planted"
    planted.mkdir(mode=0o700)
    (node_local / f"forge-{os.getuid()}").symlink_to(planted)
    with pytest.raises(UnfitError, match="planted link"):
        open_kernel_cache()
