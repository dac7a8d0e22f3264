"""A project of its own for each test, or for each file."""

from __future__ import annotations

import pytest
from support.clone import kill_tree, make_project


@pytest.fixture
def project(tmp_path):
    made = make_project(tmp_path)
    yield made
    for process in made.processes():
        kill_tree(process.pid)


@pytest.fixture(scope="module")
def shared_project(tmp_path_factory):
    """One project whose tests build on each other, in the order of the file."""
    made = make_project(tmp_path_factory.mktemp("project"))
    yield made
    for process in made.processes():
        kill_tree(process.pid)
