"""Test modules can be collected together: pytest imports those outside packages by name alone.
They read a copy of the repository: a clone has runs, profiles and notes of its user.
"""

import re
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


def test_no_test_module_looks_for_the_clone_itself():
    """CLONE and REPOSITORY are in support.repository. `make faults` and `make labs` renew pages."""
    others = {"repository.py", "outcomes.py", "labs_table.py"}
    found = []
    for path in (path for path in TESTS.rglob("*.py") if path.name not in others):
        depth = len(path.relative_to(TESTS).parts)
        ups = re.findall(r"__file__\)(?:\.resolve\(\))?\.parents\[(\d)\]", path.read_text())
        found += [path.name for up in ups if int(up) >= depth]
    assert found == []
