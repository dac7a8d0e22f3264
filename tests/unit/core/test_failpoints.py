"""Against named points that exist in one place only: a fault there would never strike.

That a run comes by each of them is seen in tests/faults.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import forge
from forge.core import failpoints
from forge.core.failpoints import FAILPOINTS

FOLDER = Path(forge.__file__).parent


def reached() -> Iterator[str]:
    """The name in each call of `failpoints.reach` in the package."""
    for path in FOLDER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "failpoints.reach":
                assert isinstance(node.args[0], ast.Constant), f"{path}: no plain name"
                yield node.args[0].value


def test_package_reaches_the_points_of_the_table_and_each_at_one_place():
    assert sorted(reached()) == sorted(FAILPOINTS)


def test_reach_tells_the_hook_and_does_nothing_without_one(tmp_path, monkeypatch):
    assert failpoints.hook is None
    failpoints.reach("save.begin", tmp_path)
    told = []
    monkeypatch.setattr(failpoints, "hook", lambda point, path: told.append((point, path)))
    failpoints.reach("save.begin", tmp_path)
    failpoints.reach("data.read")
    assert told == [("save.begin", tmp_path), ("data.read", None)]


def test_page_on_faults_has_the_points_as_they_are():
    page = (FOLDER.parent / "docs/faults.md").read_text()
    assert [p for p, where in FAILPOINTS.items() if f"| `{p}` | {where} |" not in page] == []
