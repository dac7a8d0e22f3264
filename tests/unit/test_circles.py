"""Threat: a test that no command runs, or that CI runs twice, and nobody notices."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support import circles

pytestmark = pytest.mark.tools

CONFTEST = """
from pathlib import Path
from support import circles

circles.HERE = Path(__file__).parent
circles.TIMES = circles.HERE / "times.tsv"
def pytest_addoption(parser):
    parser.addoption("--times")
def pytest_configure(config):
    config.pluginmanager.register(circles.Circles(config))
"""
TESTS = {
    "unit/test_one.py": "def test_unmarked(): pass\n",
    "slurm/test_two.py": "import pytest\n@pytest.mark.default\ndef test_story(): pass\n"
    "def test_rest(): pass\n",
    "slurm/test_three.py": "raise SystemExit('not to be imported')\n",
}


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., str]:
    """Output of pytest with the circles over the files of TESTS, and others."""

    def made(*arguments: str, **files: str) -> str:
        for name, text in {"conftest.py": CONFTEST, **TESTS, **files}.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        paths = os.pathsep.join(map(str, (circles.HERE, circles.HERE.parent)))
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", *arguments]
        return subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": paths},
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        ).stdout

    return made


def test_circle_runs_its_own_tests_and_says_which_command_runs_the_others(
    run: Callable[..., str],
) -> None:
    times = "seconds\tcircle\ttest\n600\tall\tslurm/test_two.py::test_rest\n1\tdefault\tx\n"
    said = run("-m", "default", **{"times.tsv": times})
    assert "test_unmarked PASSED" in said and "test_story PASSED" in said
    assert "test_rest PASSED" not in said and "2 passed" in said
    assert "make test-all: 1 tests, about 3 minutes on two idle cores" in said


def test_two_circles_run_at_once_and_only_the_third_is_named(run: Callable[..., str]) -> None:
    tools = "import pytest\npytestmark = pytest.mark.tools\ndef test_page(): pass\n"
    others = {"slurm/test_three.py": "def test_three(): pass\n", "unit/test_tool.py": tools}
    said = run("-m", "all or tools", **others)
    assert all(f"test_{name} PASSED" in said for name in ("rest", "three", "page"))
    assert "3 passed" in said and "make test: 0 tests" in said.partition("not run")[2]
    assert "make test-all" not in said.partition("not run")[2]


def test_marker_of_a_test_counts_more_than_that_of_its_file(run: Callable[..., str]) -> None:
    tools = (
        "import pytest\npytestmark = pytest.mark.tools\ndef test_page(): pass\n"
        "@pytest.mark.weekly\ndef test_long(): pass\n"
    )
    others = {"slurm/test_three.py": "def test_three(): pass\n", "unit/test_tool.py": tools}
    assert "test_long PASSED" not in run("-m", "all or tools", **others)
    said = run("-m", "weekly", **others)
    assert "test_long PASSED" in said and "1 passed" in said


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("odd/test_x.py", "def test_x(): pass\n", "odd/test_x.py::test_x: none"),
        (
            "unit/test_y.py",
            "import pytest\npytestmark = [pytest.mark.all, pytest.mark.default]\ndef test_y(): pass\n",
            "unit/test_y.py::test_y: default, all",
        ),
    ],
)
def test_test_that_is_in_none_or_two_ends_every_run_by_name(
    run: Callable[..., str], name: str, text: str, found: str
) -> None:
    said = run("unit", name.partition("/")[0], **{name: text})
    assert "tests that are not in one circle" in said and found in said and "passed" not in said


def test_every_folder_of_tests_has_a_circle_and_makefile_has_every_circle() -> None:
    folders = {path.parent for path in circles.HERE.rglob("test_*.py")}
    assert {circles.folder_of(path) for path in folders} <= circles.CIRCLE_OF_FOLDER.keys()
    makefile = (circles.HERE.parent / "Makefile").read_text()
    for circle, command in circles.COMMANDS.items():
        target = command.removeprefix("make ")
        assert f"\n{target}: " in makefile and f"$(pytest) -m {circle}\n" in makefile
