"""Fixtures of tests of what an older Forge has made."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.clone import Project, kill_tree
from support.past import Past, commits


@pytest.fixture(scope="session", params=commits())
def past(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Past:
    return Past.unpack(request.param, tmp_path_factory.mktemp("past"))


@pytest.fixture
def project_of(past: Past, tmp_path: Path) -> Iterator[Callable[[str], Project]]:
    """project_of("finished"): a copy of that project, which the test may change."""
    made: list[Project] = []

    def make(name: str) -> Project:
        made.append(past.project(name, tmp_path / name))
        return made[-1]

    yield make
    for project in made:
        for process in project.processes():
            kill_tree(process.pid)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the fixtures were made: more threads give other bits. Nothing is left over from a launcher."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in [name for name in os.environ if name.startswith(("SLURM_", "FORGE_"))]:
        if not name.startswith("FORGE_TEST"):
            monkeypatch.delenv(name)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
