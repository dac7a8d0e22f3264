"""Kernels are code that every launch of a run executes: they survive a requeue, in a place that nobody
else writes, and a node that cannot use that place still trains."""

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from forge.core import provenance
from forge.core.errors import UnfitError
from forge.core.paths import kernels_folder
from forge.launch.kernel_cache import VARIABLE, is_default, kernel_cache, open_kernel_cache

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


def test_directory_is_made_for_its_user_alone(monkeypatch, tmp_path, node_local):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "project/kernels/user"))
    open_kernel_cache()
    assert (tmp_path / "project/kernels/user").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_directory_that_others_can_change_is_not_used(
    monkeypatch, tmp_path, node_local, capsys, mode
):
    planted = tmp_path / "kernels"
    planted.mkdir()
    planted.chmod(mode)
    monkeypatch.setenv(VARIABLE, str(planted))
    open_kernel_cache()
    assert os.environ[VARIABLE] == str(own_of(node_local))
    assert f"others can write to {planted} (mode {mode:o})" in capsys.readouterr().err


def test_directory_of_another_user_is_not_used(monkeypatch, tmp_path, node_local, capsys):
    (tmp_path / "kernels").mkdir(mode=0o700)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "kernels"))
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(UnfitError):  # nor is that on the node, which now is of another user
        node_local.mkdir()
        (node_local / f"forge-{owner + 1}").mkdir(mode=0o700)
        open_kernel_cache()
    assert f"kernels belongs to user {owner}" in capsys.readouterr().err


def test_default_of_torch_is_no_choice_of_the_user(monkeypatch, node_local):
    for folder in (Path("/tmp"), Path(tempfile.gettempdir())):
        monkeypatch.setenv(VARIABLE, str(folder / "torchinductor_someone"))
        open_kernel_cache()
        assert os.environ[VARIABLE] == str(own_of(node_local))
    assert is_default(str(own_of(node_local)))
    assert not is_default("/scratch/me/torchinductor_cache")


def test_compiler_that_a_command_imports_keeps_kernels_in_the_directory_of_its_user(tmp_path):
    stub, node = tmp_path / "stub", tmp_path / "node"
    (stub / "torch").mkdir(parents=True)
    (stub / "torch" / "__init__.py").touch()
    (stub / "torch" / "_dynamo.py").touch()
    code = (
        "import os, sys; sys.argv = ['forge', 'status']; import forge.cli as cli\n"
        "cli._prepare = lambda options: __import__('torch._dynamo') and sys.exit()\n"
        f"try: cli.main()\nexcept SystemExit: print(os.environ['{VARIABLE}'])"
    )
    environ = {**os.environ, "TMPDIR": str(node), "PYTHONUTF8": "1", "PYTHONPATH": str(stub)}
    environ |= {VARIABLE: str(node / "torchinductor_me")}
    node.mkdir()
    environ.pop("SLURM_TMPDIR", None)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, text=True, stdout=-1, check=True
    )
    assert done.stdout.splitlines()[-1] == str(own_of(node))
    assert [path.name for path in node.iterdir()] == [f"forge-{os.getuid()}"]


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
