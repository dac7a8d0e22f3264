"""Circles of tests: what `make test` runs, and what `make test-all`, `make test-tools` and
`make test-weekly` run besides.

Every test is in one circle: the one that its own marker names, else that of its file, else of its folder.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[1]
COMMANDS = {
    "default": "make test",
    "all": "make test-all",
    "tools": "make test-tools",
    "weekly": "make test-weekly",
}
CIRCLE_OF_FOLDER = {
    "unit": "default",
    "past": "default",
    "plugins": "default",
    "workflow": "all",
    "distributed": "all",
    "faults": "all",
    "gpu": "all",
    "slurm": "all",
}
# Tests on Slurm wait more than they compute: their files are spread among the others.
WAITING = "slurm"
TIMES = HERE / "times.tsv"
PROCESSES = 3  # of `make test`, by which its tests share the machine
CIRCLE = "circle"  # property of a test, which its reports carry to the process that prints


def folder_of(path: Path) -> str:
    return path.relative_to(HERE).parts[0]


def recorded_times() -> dict[str, tuple[str, float]]:
    """Test -> its circle and its seconds on an idle machine of two cores, by `make test-times`."""
    rows = (line.split("\t") for line in TIMES.read_text().splitlines()[1:])
    return {name: (circle, float(seconds)) for seconds, circle, name in rows}


def circles_of(item: pytest.Item) -> list[str]:
    """The circles that its own markers name; those of its file or folder where there is none."""
    own = [mark.name for mark in item.own_markers if mark.name in COMMANDS]
    own = own or [name for name in COMMANDS if item.get_closest_marker(name)]
    return own or [
        CIRCLE_OF_FOLDER[name] for name in [folder_of(item.path)] if name in CIRCLE_OF_FOLDER
    ]


class Circles:
    """The plugin: markers, order, and what was not run."""

    def __init__(self, config: pytest.Config) -> None:
        wanted = (config.getoption("markexpr") or "").split(" or ")
        self.wanted = wanted if set(wanted) <= COMMANDS.keys() else []
        self.took: dict[str, tuple[str, float]] = {}  # test -> circle, seconds
        self.times = recorded_times() if TIMES.is_file() else {}

    def pytest_report_header(self) -> list[str]:
        return [self._size(circle) for circle in self.wanted]

    def _size(self, circle: str) -> str:
        seconds = [seconds for other, seconds in self.times.values() if other == circle]
        minutes = max(1, round(sum(seconds) / PROCESSES / 60))
        return (
            f"{COMMANDS[circle]}: {len(seconds)} tests, about {minutes} minutes on two idle cores"
        )

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """A file without a test of the circle is not imported: to import all takes 20 s a process, and
        some need packages that others do without."""
        path = collection_path
        if not self.wanted or not path.name.startswith("test_") or path.suffix != ".py":
            return None
        text = path.read_text()
        of_file = re.search(
            rf"^pytestmark = .*\bmark\.({'|'.join(COMMANDS)})\b", text, re.MULTILINE
        )
        of_all = of_file[1] if of_file else CIRCLE_OF_FOLDER.get(folder_of(path))
        own = any(f"mark.{circle}" in text for circle in self.wanted)
        return None if of_all in self.wanted or own else True

    @pytest.hookimpl(tryfirst=True)  # before -m chooses
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        unclear = []
        for item in items:
            circles = circles_of(item)
            if len(circles) != 1:
                unclear.append(f"{item.nodeid}: {', '.join(circles) or 'none'}")
            for name in circles:
                item.add_marker(name)
                item.user_properties.append((CIRCLE, name))
        if unclear:
            listed = "\n  ".join(unclear)
            raise pytest.UsageError(
                f"tests that are not in one circle (CONTRIBUTING.md):\n  {listed}"
            )
        if self.wanted:  # -m would choose also by the marker of the file
            others = [item for item in items if circles_of(item)[0] not in self.wanted]
            items[:] = [item for item in items if circles_of(item)[0] in self.wanted]
            config.hook.pytest_deselected(items=others)
        self._sort(items)

    def _sort(self, items: list[pytest.Item]) -> None:
        """Long files first, so that short ones keep all processes busy at the end."""
        seconds: dict[Path, float] = defaultdict(float)
        for item in items:
            seconds[item.path] += self.times.get(item.nodeid, ("", 0.0))[1]
        place: dict[Path, float] = {}
        for is_waiting in (False, True):
            files = [path for path in seconds if (folder_of(path) == WAITING) == is_waiting]
            files.sort(key=lambda path: -seconds[path])
            before, total = 0.0, sum(seconds[path] for path in files) or 1.0
            for path in files:
                place[path] = before / total
                before += seconds[path]
        items.sort(key=lambda item: place[item.path])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called in the process that prints, also with xdist."""
        [circle] = [value for name, value in report.user_properties if name == CIRCLE] or ["?"]
        before = self.took.get(report.nodeid, (circle, 0.0))[1]
        self.took[report.nodeid] = circle, before + report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        others = [circle for circle in COMMANDS if circle not in self.wanted]
        if not self.wanted or not others:
            return
        terminalreporter.section("not run")
        for circle in others:
            terminalreporter.line(self._size(circle))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        path = session.config.getoption("times")
        if not path or hasattr(session.config, "workerinput"):
            return
        rows = (
            f"{seconds:.2f}\t{circle}\t{name}"
            for name, (circle, seconds) in sorted(self.took.items())
        )
        Path(path).write_text("\n".join(["seconds\tcircle\ttest", *rows, ""]))
