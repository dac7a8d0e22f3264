"""Fixture: a launch as its launcher has written it. For the conftest.py of a folder, which imports it."""

import pytest

from forge.core.machine import Machine
from forge.core.process import Process
from forge.launch.rank_records import LaunchSpec, PreflightTask

__all__ = ["spec"]


@pytest.fixture
def spec(tmp_path):
    spec = LaunchSpec(
        task=PreflightTask(patience_sec=5, nccl_file=""),
        run=str(tmp_path),
        launch="now",
        machine=Machine(),
        nodes=1,
        ranks_per_node=4,
        launcher=Process.current(),
    )
    spec.write(spec.path)
    return spec
