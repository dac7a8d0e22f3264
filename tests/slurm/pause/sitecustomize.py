"""Makes each rank wait before a training step: with this folder on PYTHONPATH, Python imports it at
start.

FORGE_TEST_PAUSE is the number of the step. A rank that comes to it leaves a file waiting-NAME in
RUN/.pause, and stopping-NAME once it has been told to stop, and waits until RUN/.pause/over is there.
It waits in its main thread and between two collectives, so it handles signals as in a step.
"""

import os
import signal
import sys
import time
from pathlib import Path


def _arm() -> None:
    if "forge.worker" not in sys.orig_argv or "torch.distributed.run" in sys.orig_argv:
        return
    from forge.core import failpoints

    failpoints.hook = Pause(
        before_step=int(os.environ["FORGE_TEST_PAUSE"]),
        folder=Path(sys.orig_argv[-1]).parents[2] / ".pause",  # behind RUN/.launch/ID/spec.json
    )


class Pause:
    """The hook: counts the steps of this process, which are those of the run in its first launch."""

    def __init__(self, before_step: int, folder: Path) -> None:
        self._before_step, self._folder = before_step, folder
        self._begun = 0

    def __call__(self, point: str, _path: Path | None) -> None:
        self._begun += point == "data.read"
        if point == "data.read" and self._begun == self._before_step:
            self._wait(f"{os.uname().nodename}-{os.getpid()}")

    def _wait(self, name: str) -> None:
        self._folder.mkdir(exist_ok=True)
        (self._folder / f"waiting-{name}").touch()
        stop_flag = signal.getsignal(signal.SIGTERM).__self__  # the StopFlag of forge.worker
        while not (self._folder / "over").exists():
            if stop_flag.cause():
                (self._folder / f"stopping-{name}").touch()
            time.sleep(0.05)


if "FORGE_TEST_PAUSE" in os.environ:
    _arm()
