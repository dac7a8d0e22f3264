"""What holds for every test: it leaves its process as it found it, for the tests that come after it."""

import os
import signal
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
from support import circles

from forge.core.process import stop_with_parent

pytest_plugins = ("support.surroundings",)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", metavar="FILE", help="write the seconds of every test to FILE")


def pytest_configure(config: pytest.Config) -> None:
    for circle, command in circles.COMMANDS.items():
        config.addinivalue_line("markers", f"{circle}: run by `{command}`")
    config.pluginmanager.register(circles.Circles(config))
    if find_spec("hypothesis"):  # not on a machine with a GPU and packages of its own
        import hypothesis

        # By default an example that takes 0.2 s fails its test: on a busy machine any does.
        hypothesis.settings.register_profile("forge", deadline=None)
        hypothesis.settings.load_profile("forge")


def pytest_sessionstart() -> None:
    """What this process forks ends with it: a child holds its pipes, and xdist would wait for ever for a
    worker that a time limit has ended, because the pipes never close. A shell has its background jobs
    ignore Ctrl-C, and all that they start: tests press it."""
    os.register_at_fork(after_in_child=partial(stop_with_parent, signal.SIGKILL))
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def _leaves_folder_and_variables_as_they_were() -> Iterator[None]:
    """Variables are put back: those that a command exports for its own process, called here without one,
    and those that torch sets for itself."""
    before, variables = Path.cwd(), dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(variables)
    assert Path.cwd() == before, "a test or a fixture of this file changed the folder for good"
