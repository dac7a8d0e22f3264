"""Training steps on a simulated GPU, each case in a process of its own: `support.simulated_gpu`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.simulated_gpu.device import Findings

TESTS = Path(__file__).parents[2]
SOURCE = TESTS / "support" / "simulated_gpu" / "guard.cpp"
DEADLINE_SEC = 300


def _run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=DEADLINE_SEC, **options
    )


@pytest.fixture(scope="session")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that lets fake tensors be on `cuda`."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        if os.environ.get("FORGE_TEST_SLURM") == "required":  # in CI nothing is skipped
            pytest.fail("no C++ compiler")
        pytest.skip("no C++ compiler")
    import torch

    root, library = Path(torch.__path__[0]), tmp_path_factory.mktemp("guard") / "guard.so"
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{root}/include"]
    command += [f"-L{root}/lib", f"-Wl,-rpath,{root}/lib", "-o", str(library), str(SOURCE)]
    done = _run([*command, "-lc10", "-ltorch_cpu"])
    assert done.returncode == 0, done.stderr
    return library


@pytest.fixture(scope="session")
def simulate(guard: Path) -> Callable[..., Findings]:
    """Findings of the last of some steps of a Case, by its fields; each case is run once."""

    @cache
    def run(case: str) -> list[dict[str, Any]]:
        paths = os.pathsep.join(map(str, (TESTS.parent, TESTS)))
        command = [sys.executable, "-m", "support.simulated_gpu.training", case]
        done = _run(command, env={**os.environ, "PYTHONPATH": paths})
        assert done.returncode == 0, done.stderr
        found: list[dict[str, Any]] = json.loads(done.stdout)
        return found

    def simulated(**case: Any) -> Findings:
        return Findings(**run(json.dumps({"guard": str(guard), **case}))[-1])

    return simulated
