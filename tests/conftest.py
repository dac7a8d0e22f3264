"""What holds for every test: it leaves its process as it found it, for the tests that come after it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

# The folders with the longest files first: at the end short files keep all processes busy.
ORDER = ("slurm", "workflow", "distributed", "faults", "gpu", "unit")
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: ORDER.index(item.path.relative_to(HERE).parts[0]))


@pytest.fixture(scope="module", autouse=True)
def _stays_in_its_folder() -> Iterator[None]:
    before = Path.cwd()
    yield
    assert Path.cwd() == before, "a test or a fixture of this file changed the folder for good"
