"""What holds for every test: it leaves its process as it found it, for the tests that come after it."""

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from forge.core.process import stop_with_parent

# The folders with the longest files first: at the end short files keep all processes busy.
ORDER = ("workflow", "distributed", "faults", "gpu", "unit")
# Tests that wait more than they compute: their files are spread among those before the last folder.
WAITING = "slurm"
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folders = {item.path: item.path.relative_to(HERE).parts[0] for item in items}
    waiting = [path for path, folder in folders.items() if folder == WAITING]
    others = [path for path, folder in folders.items() if folder != WAITING]
    others.sort(key=lambda path: ORDER.index(folders[path]))
    before = sum(folders[path] != ORDER[-1] for path in others)
    place = {path: float(number) for number, path in enumerate(others)}
    place |= {path: number * before / len(waiting) for number, path in enumerate(waiting)}
    items.sort(key=lambda item: place[item.path])


def pytest_sessionstart() -> None:
    """What this process forks ends with it: a child holds its pipes, and xdist would wait for ever for a
    worker that a time limit has ended, because the pipes never close."""
    os.register_at_fork(after_in_child=partial(stop_with_parent, signal.SIGKILL))


@pytest.fixture(scope="module", autouse=True)
def _leaves_folder_and_variables_as_they_were() -> Iterator[None]:
    """Variables are put back: those that a command exports for its own process, called here without one,
    and those that torch sets for itself."""
    before, variables = Path.cwd(), dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(variables)
    assert Path.cwd() == before, "a test or a fixture of this file changed the folder for good"
