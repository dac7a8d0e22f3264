"""Training steps on a simulated GPU, each case in a forked process: `support.simulated_gpu`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.forked import LEFT_OVER
from support.simulated_gpu.device import Findings

TESTS = Path(__file__).parents[2]
SOURCE = TESTS / "support" / "simulated_gpu" / "guard.cpp"
COMPILED_SEC = 300


@pytest.fixture(scope="session")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that lets fake tensors be on `cuda`."""
    import torch

    if torch.version.cuda:  # as the index gives it to most; CI has a build for CPUs
        pytest.skip("the simulated GPU needs a build of PyTorch without CUDA")
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        if os.environ.get("FORGE_TEST_SLURM") == "required":  # in CI nothing is skipped
            pytest.fail("no C++ compiler")
        pytest.skip("no C++ compiler")
    root, library = Path(torch.__path__[0]), tmp_path_factory.mktemp("guard") / "guard.so"
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{root}/include"]
    command += [f"-L{root}/lib", f"-Wl,-rpath,{root}/lib", "-o", str(library), str(SOURCE)]
    done = subprocess.run(
        [*command, "-lc10", "-ltorch_cpu"],
        check=False,
        capture_output=True,
        text=True,
        timeout=COMPILED_SEC,
    )
    assert done.returncode == 0, done.stderr
    return library


@pytest.fixture(scope="session")
def simulate(
    guard: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Findings]]:
    """Findings of the last of some steps of a Case, by its fields; each case is run once."""
    errors = tmp_path_factory.mktemp("simulated") / "errors"
    own = [str(TESTS.parent), str(TESTS)]
    paths = os.pathsep.join([*own, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "support.simulated_gpu.training", str(guard)]
    # Without the mark of the processes that tests of ranks end behind them.
    kept = {name: value for name, value in os.environ.items() if name not in LEFT_OVER}
    pipe, environment = subprocess.PIPE, {**kept, "PYTHONPATH": paths}
    with (
        open(errors, "w") as stderr,
        subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=stderr, text=True, env=environment
        ) as server,
    ):

        @cache
        def run(case: str) -> list[dict[str, Any]]:
            assert server.stdin and server.stdout
            print(case, file=server.stdin, flush=True)
            found: list[dict[str, Any]] | None = json.loads(server.stdout.readline() or "null")
            assert found, errors.read_text()
            return found

        yield lambda **case: Findings(**run(json.dumps(case))[-1])
