"""The built packages are enough: an editable install would hide a sub-package that they lack."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import yaml
from support.clone import TINY, Project
from support.repository import CLONE, REPOSITORY, files_of_project

BUILD = "import sys; from setuptools.build_meta import build_{0}; build_{0}(sys.argv[1])"
EXECUTOR = "--forge-reservation"  # an option of it, in the help of Snakemake
# Of those who change Forge, not of those who train with it.
LEFT_OUT = {".ci", ".github", ".gitattributes", ".gitignore", ".pre-commit-config.yaml"}


def built(source: Path, kind: str, pattern: str) -> Path:
    """A distribution ("sdist" or "wheel") of a source tree."""
    target = source.parent / kind
    subprocess.run([sys.executable, "-c", BUILD.format(kind), target], cwd=source, check=True)
    [distribution] = target.glob(pattern)
    return distribution


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of the files of this repository, unpacked."""
    folder = tmp_path_factory.mktemp("source")
    for name in tracked_files():
        (folder / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, folder / "clone" / name)
    source = built(folder / "clone", "sdist", "forge-*.tar.gz")
    subprocess.run(["tar", "-xzf", source, "-C", folder], check=True)
    [project] = folder.glob("forge-*")
    return project


@pytest.fixture(scope="module")
def installed(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with the wheel of that, and with the libraries of this one."""
    environment = tmp_path_factory.mktemp("environment")
    wheel = built(unpacked, "wheel", "forge-*.whl")
    venv.create(environment)
    pip = [sys.executable, "-m", "pip", "--python", environment / "bin/python", "install"]
    subprocess.run([*pip, "--quiet", "--no-index", "--no-deps", wheel], check=True)
    # The libraries without what an editable install leaves there: a .pth below it is not read.
    [site] = environment.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    snakemake = environment / "bin/snakemake"
    # -P: as a script, without the current directory. A blank may not be in a line of `#!`.
    snakemake.write_text(f'#!/bin/sh\nexec "{environment}/bin/python" -P -m snakemake "$@"\n')
    snakemake.chmod(0o755)
    return environment / "bin"


def test_source_distribution_has_every_file_of_the_project(unpacked: Path) -> None:
    wanted = {name for name in tracked_files() if Path(name).parts[0] not in LEFT_OUT}
    assert wanted - {str(file) for file in files_below(unpacked)} == set()
    assert (unpacked / "tools/setup.sh").stat().st_mode & 0o111, "make cannot run it"


def test_installed_wheel_runs_the_first_rules(installed: Path, project: Project) -> None:
    environ = {**project.environment, "PATH": f"{installed}{os.pathsep}{os.environ['PATH']}"}

    def output(program: str, *arguments: str) -> str:
        done = subprocess.run(
            [installed / program, *arguments],
            cwd=project.root,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    module = Path(output("python", "-c", "import forge; print(forge.__file__)").strip())
    assert module.is_relative_to(installed.parent)
    assert files_below(module.parent) == files_below(REPOSITORY / "forge")
    assert not [*installed.parent.rglob("examples/plugins")]
    # -P: without the project's own copy of the executor.
    assert EXECUTOR in output("python", "-P", "-m", "snakemake", "--help")
    assert "validate" in output("forge", "--help")
    output("snakemake", "--profile", "profiles/local", "--until", "tokenize")
    assert list(project.root.glob("data/tokens/*/manifest.json"))


def test_editable_install_puts_the_project_into_the_path_for_the_executor(unpacked: Path) -> None:
    """By the default of setuptools: Snakemake does not find an executor by an import hook."""
    with zipfile.ZipFile(built(unpacked, "editable", "forge-*.whl")) as wheel:
        [path] = [name for name in wheel.namelist() if name.endswith(".pth")]
        assert wheel.read(path).decode().splitlines() == [str(unpacked)]
        assert not any(name.endswith(".py") for name in wheel.namelist())


def test_executor_is_found_in_any_directory(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "snakemake", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert EXECUTOR in done.stdout


def test_installed_wheel_has_the_workflow_and_makes_a_project_that_trains(
    installed: Path, tmp_path: Path
) -> None:
    """The lines that `forge init` ends with, as they are printed, in a directory of its own."""
    share = installed.parent / "share/forge"
    for name in ("workflow", "profiles", "config/sizes"):
        assert files_below(share / name) == files_below(REPOSITORY / name)
    environ = {
        **os.environ,
        "PATH": f"{installed}{os.pathsep}{os.environ['PATH']}",
        "NO_COLOR": "1",
    }

    def shell(text: str) -> str:
        done = subprocess.run(
            ["bash", "-ec", text],
            cwd=tmp_path,
            env={**environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        print(f"$ {text}\n{done.stdout}")
        assert done.returncode == 0, text
        return done.stdout

    said = shell("forge init my-project").splitlines()
    lines = [line.strip() for line in said if line.startswith("  ")]
    cd, dry_run, trains, profile = lines
    assert cd == "cd my-project" and trains in dry_run and profile == "forge profile mine"
    assert "rule train_run:" in shell(f"{cd}; {dry_run}")
    evaluate = "--config 'evaluate={tasks: [words]}' --"  # the target of a plugin
    assert "rule evaluate_run:" in shell(f"{cd}; {dry_run} {evaluate} evaluate")
    config = tmp_path / "my-project/config/config.yaml"  # made small
    config.write_text(yaml.safe_dump({**TINY, "train": {**TINY["train"], "max_steps": 4}}))
    shutil.copytree(REPOSITORY / "workflow/rules", tmp_path / "my-project/corpus")
    assert "base  validated" in shell(f"{cd}; {trains}")


def tracked_files() -> list[str]:
    return [name for name in files_of_project(CLONE) if (REPOSITORY / name).is_file()]


def files_below(folder: Path) -> set[Path]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {path.relative_to(folder) for path in files}
