"""What holds for every test: it leaves its process as it found it, for the tests that come after it."""

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module", autouse=True)
def _stays_in_its_folder() -> Iterator[None]:
    before = Path.cwd()
    yield
    assert Path.cwd() == before, "a test or a fixture of this file changed the folder for good"
