"""`environment.modules`: what `module load` changes reaches the ranks, and one that fails is told at
once, not by a rank that lacks a library. A function in the start file of a login shell plays `module`."""

import os

import pytest

from forge.core.errors import ConfigError, UnfitError
from forge.core.machine import load_machine
from forge.core.paths import modules_file
from forge.core.process import hostname
from forge.hosts import placement
from forge.hosts.modules import load_modules
from forge.hosts.placement import WorldLayout
from forge.slurm import slurm

MODULE = """
module() {
    shift  # load
    for name; do
        case $name in
            cuda*) export CUDA_HOME=/opt/cuda PATH=/opt/cuda/bin:$PATH MANPATH=$MANPATH:/opt/cuda/man
                LOADEDMODULES=$LOADEDMODULES:cuda/12.4 ;;
            gcc*) export CC=gcc; LOADEDMODULES=$LOADEDMODULES:gcc/13.2; unset MY_OLD ;;
            compiler*) LOADEDMODULES=$LOADEDMODULES:compiler/gcc/13.2 ;;
            quiet*) ;;  # Environment Modules 3.2 says so, and ends with 0
            rank) export RANK=3 MASTER_ADDR=n9 SLURM_X=1 LOADEDMODULES=$LOADEDMODULES:rank/1 ;;
            *) echo "Lmod has detected the following error:  unknown: $name" >&2; return 1 ;;
        esac
    done
}
export LOADEDMODULES=site/1 MANPATH=/usr/man
echo "Welcome to the cluster"
"""


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """A home directory whose login shell has `module`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("BASH_ENV", raising=False)
    (tmp_path / ".bash_profile").write_text(MODULE)
    return tmp_path / ".bash_profile"


def job(restarts=0):
    return slurm.Job("42", "RUNNING", restarts, ("n1",), 1, "gpu", "base", True, None)


def load(*modules):
    return load_modules(modules, hostname(), None)


def test_variables_and_names_of_what_was_loaded_are_known(shell):
    found = load("cuda", "gcc")
    assert found.names == ("cuda/12.4", "gcc/13.2")
    assert found.variables["CUDA_HOME"] == "/opt/cuda" and found.variables["CC"] == "gcc"
    assert "HOME" not in found.variables and "SHLVL" not in found.variables


def test_paths_are_added_to_those_of_this_process(shell, monkeypatch):
    monkeypatch.setenv("PATH", f"/my/venv/bin:{os.environ['PATH']}")
    monkeypatch.setenv("MANPATH", "/my/man")
    shell.write_text(f"PATH=/usr/bin:/bin\n{MODULE}")  # as a login shell begins anew
    found = load("cuda")
    assert found.variables["PATH"] == f"/opt/cuda/bin:{os.environ['PATH']}"
    assert found.variables["MANPATH"] == "/my/man:/opt/cuda/man"


def test_what_a_launcher_sets_for_each_rank_is_not_taken_from_a_module(shell):
    assert set(load("rank").variables) == {"LOADEDMODULES"}


@pytest.mark.parametrize(
    ("name", "loaded"),
    [
        *(("gcc/13", "gcc/13.2"), ("cuda/default", "cuda/12.4"), ("cuda@12.4", "cuda/12.4")),
        *(("compiler/gcc/13", "compiler/gcc/13.2"), ("compiler/gcc", "compiler/gcc/13.2")),
    ],
)
def test_module_whose_version_is_completed_is_known_by_its_full_name(shell, name, loaded):
    assert load(name).names == (loaded,)


@pytest.mark.parametrize("name", ["nosuch", "quiet", "quiet/2"])
def test_module_that_does_not_load_is_refused_with_what_module_says(shell, name):
    with pytest.raises(ConfigError, match=rf"environment\.modules \[gcc, {name}\]") as caught:
        load("gcc", name)
    assert ("unknown: nosuch" in caught.value.what) == (name == "nosuch")
    assert "module avail" in caught.value.fix


def test_shell_without_modules_is_refused(shell):
    shell.write_text("module() { :; }; unset -f module\n")
    with pytest.raises(ConfigError, match="knows no command `module`"):
        load("cuda")


def test_start_file_that_hangs_is_told_in_time(shell, monkeypatch):
    monkeypatch.setattr("forge.hosts.modules.LOAD_SEC", 0.5)
    shell.write_text("sleep 10\n")
    with pytest.raises(UnfitError, match=r"no answer within 0\.5 s") as caught:
        load("cuda")
    assert "bash -lc 'module load cuda'" in caught.value.fix


def test_first_node_of_the_job_loads_them_where_this_host_is_none_of_it(monkeypatch):
    asked = []
    monkeypatch.setattr(slurm, "run_step", lambda line, **_: (asked.append(line), ("", "boom"))[1])
    with pytest.raises(UnfitError, match=r"\[cuda\] on n1: boom"):
        load_modules(["cuda"], "n1", job())
    assert "--nodelist=n1" in asked[0] and asked[0][-2:] == ["bash", "cuda"]


def test_each_start_of_a_job_loads_them_once(shell, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    first = load_modules(["gcc"], hostname(), job())
    shell.write_text("module() { return 1; }\n")
    assert load_modules(["gcc"], hostname(), job()) == first
    for modules, start in ((["gcc"], job(restarts=1)), (["gcc", "cuda"], job())):
        with pytest.raises(ConfigError, match="module load failed"):
            load_modules(modules, hostname(), start)


def test_record_that_is_corrupt_is_made_again(shell, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    first = load_modules(["gcc"], hostname(), job())
    modules_file(hostname()).write_text("{")
    assert load_modules(["gcc"], hostname(), job()) == first


def test_variables_of_machine_yaml_win_over_those_of_modules(shell):
    environment = {"modules": ["cuda"], "variables": {"CUDA_HOME": "/mine"}}
    where = placement.find_placement(
        load_machine(None, {"environment": environment}), WorldLayout()
    )
    assert where.variables["CUDA_HOME"] == "/mine"
    assert where.variables["PATH"].startswith("/opt/cuda/bin:")
    recorded = where.recorded_environment()
    assert (recorded.modules, recorded.variables) == (["cuda/12.4"], ["CUDA_HOME"])


@pytest.mark.parametrize("name", ["-f", "a b", "$(id)", "", "a;b"])
def test_name_that_no_module_has_is_refused(name):
    with pytest.raises(ConfigError, match=r"environment\.modules"):
        load_machine(None, {"environment": {"modules": [name]}})
