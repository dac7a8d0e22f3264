"""The sending process as the launcher starts and ends it; whatever happens to it, training goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from forge.core import project_plugins
from forge.core.errors import ForgeError
from forge.core.files import open_private
from forge.core.paths import RunPaths
from forge.core.terminal import say
from forge.plugins.tracking.feed import sent_file
from forge.plugins.tracking.places import log_file
from forge.plugins.tracking.records import Sent
from forge.plugins.tracking.settings import Tracking
from forge.plugins.tracking.tracker import missing_packages

# After training, the process has this long to send the rest.
FINISH_SEC = 30.0
KILL_SEC = 5.0  # for the end of a killed process


@contextmanager
def tracked(paths: RunPaths, tracking: Tracking) -> Iterator[None]:
    """Send the numbers of the run while the body trains. Nothing that goes wrong with it is raised."""
    tracking = _installed(tracking)
    before = {name: _written(paths, name) for name in tracking.trackers}
    child = _start(paths, tracking) if before else None
    try:
        yield
    finally:
        if child:
            _finish(child)
        left = [
            n
            for n, then in before.items()
            if _written(paths, n) == then or not _is_complete(paths, n)
        ]
        if left:
            say(
                f"warning: tracking: not everything was sent to {', '.join(left)};"
                f" the next start sends the rest, or: forge sync {paths.root}"
            )


def _installed(tracking: Tracking) -> Tracking:
    """The trackers whose package this node has."""
    missing = missing_packages(tracking)
    if missing:
        say(
            f"warning: tracking: Python has no package {', '.join(missing)} on this node;"
            " training is not affected"
        )
    return tracking.model_copy(update=dict.fromkeys(missing))


def _start(paths: RunPaths, tracking: Tracking) -> subprocess.Popen[bytes] | None:
    command = [sys.executable, "-m", "forge.plugins.tracking.feed", str(paths.root)]
    try:
        paths.logs.mkdir(parents=True, exist_ok=True)
        # What libraries say of an address may have its password.
        with open(log_file(paths), "a", opener=open_private) as log:
            child = subprocess.Popen(
                command,
                env={**os.environ, **project_plugins.hand_on()},
                stdin=subprocess.PIPE,
                stdout=log,
                start_new_session=True,
            )
        assert child.stdin
        with suppress(BrokenPipeError):  # it has crashed, which `_finish` notices
            child.stdin.write(tracking.model_dump_json().encode() + b"\n")
            child.stdin.flush()
        return child
    except OSError as err:
        say(f"warning: tracking: {err}; training is not affected")
        return None


def _finish(child: subprocess.Popen[bytes]) -> None:
    """Give it FINISH_SEC to send the rest, and end it with all its children."""
    assert child.stdin
    with suppress(OSError):
        child.stdin.close()  # tells it that training is over
    with suppress(subprocess.TimeoutExpired):
        child.wait(FINISH_SEC)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    with suppress(
        subprocess.TimeoutExpired
    ):  # it waits in the kernel, and training does not for it
        child.wait(KILL_SEC)


def _written(paths: RunPaths, name: str) -> int:
    """Time at which the record of the rows sent to this tracker was written; each process writes it."""
    path = sent_file(paths, name)
    return path.stat().st_mtime_ns if path.exists() else 0


def _is_complete(paths: RunPaths, name: str) -> bool:
    try:
        sent = Sent.read_if_there(sent_file(paths, name))
    except ForgeError:
        return False
    return bool(sent and sent.complete)
