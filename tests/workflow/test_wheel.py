"""The built package alone is enough: an editable install would hide a sub-package that it lacks."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from conftest import REPOSITORY, Project

BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
PARTS = ("pyproject.toml", "README.md", "LICENSE", "forge")


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The bin folder of an environment with the wheel, and with the libraries of this one."""
    source, wheels, environment = (tmp_path / name for name in ("source", "wheels", "environment"))
    source.mkdir()
    for part in PARTS:
        subprocess.run(["cp", "-r", REPOSITORY / part, source], check=True)
    subprocess.run([sys.executable, "-c", BUILD, wheels], cwd=source, check=True)
    [wheel] = wheels.glob("forge-*.whl")
    venv.create(environment)
    pip = [sys.executable, "-m", "pip", "--python", environment / "bin/python", "install"]
    subprocess.run([*pip, "--quiet", "--no-index", "--no-deps", wheel], check=True)
    # The libraries without what an editable install leaves there: a .pth below it is not read.
    [site] = environment.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    return environment / "bin"


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
    assert "validate" in output("forge", "--help")
    output("python", "-m", "snakemake", "--profile", "profiles/local", "--until", "tokenize")
    assert list(project.root.glob("data/tokens/*/manifest.json"))


def files_below(folder: Path) -> set[Path]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {path.relative_to(folder) for path in files}
