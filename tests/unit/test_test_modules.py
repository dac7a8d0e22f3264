"""Test modules can be collected together: pytest imports those outside packages by name alone."""

from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.tools

TESTS = Path(__file__).parents[1]


def test_no_two_test_modules_outside_of_packages_have_the_same_name():
    modules = [
        path for path in TESTS.rglob("test_*.py") if not (path.parent / "__init__.py").exists()
    ]
    names = Counter(path.name for path in modules)
    assert [name for name, count in names.items() if count > 1] == []
