"""Makes ranks wait before training steps: with this folder on PYTHONPATH, Python imports it at start.

FORGE_TEST_PAUSE holds the numbers of the steps. A rank that comes to one of them leaves a file
waiting-NAME in RUN/.pause/STEP, and stopping-NAME once it has been told to stop, and waits until
RUN/.pause/STEP/over is there; where it is there already, as in later launches, it does not wait.
A rank on a host for which there is RUN/.pause/STEP/gpu-fails-HOST then fails as PyTorch does with a
broken GPU.
FORGE_TEST_PACE: seconds of sleep before each step, until RUN/.pause/pace-over is there.
FORGE_TEST_CLOCK: NODE=SECONDS, by which the clock of that node is ahead.
It waits in its main thread and between two collectives, so it handles signals as in a step.

FORGE_TEST_HOLD is a folder. A command `forge NAME` for which it holds NAME-hold leaves NAME-waiting there
as it starts, and goes on once there is NAME-over.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path


def _arm() -> None:
    # Not torchrun, which names the module too, behind its own.
    if "forge.worker" not in sys.orig_argv or sys.orig_argv.count("-m") > 1:
        return
    from forge.core import failpoints

    spec = Path(sys.orig_argv[-1])  # RUN/.launch/ID/spec.json
    task = json.loads(spec.read_text())["task"]
    if task["name"] == "train":
        steps = {int(step) for step in os.environ["FORGE_TEST_PAUSE"].split(",") if step}
        failpoints.hook = Pause(steps, task["step"], spec.parents[2] / ".pause")


class Pause:
    """The hook: counts the steps of the run, from the one that this launch resumes."""

    def __init__(self, before_steps: set[int], done: int, folder: Path) -> None:
        self._before_steps, self._done, self._folder = before_steps, done, folder
        self._pace_sec = float(os.environ.get("FORGE_TEST_PACE", "0"))

    def __call__(self, point: str, _path: Path | None) -> None:
        self._done += point == "data.read"
        if point == "data.read" and self._pace_sec and not (self._folder / "pace-over").exists():
            time.sleep(self._pace_sec)
        if point == "data.read" and self._done in self._before_steps:
            self._wait(self._folder / str(self._done), f"{os.uname().nodename}-{os.getpid()}")

    def _wait(self, folder: Path, name: str) -> None:
        if (folder / "over").exists():
            return
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"waiting-{name}").touch()
        stop_flag = signal.getsignal(signal.SIGTERM).__self__  # the StopFlag of forge.worker
        while not (folder / "over").exists():
            if stop_flag.cause():
                (folder / f"stopping-{name}").touch()
            time.sleep(0.05)
        if (folder / f"gpu-fails-{os.uname().nodename}").exists():
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")


def _set_clock(node: str, ahead_sec: float) -> None:
    """time.time of processes on a node whose clock is ahead; files keep their times, of their server."""
    if os.uname().nodename == node:
        right = time.time
        time.time = lambda: right() + ahead_sec


def _hold_commands(folder: Path) -> None:
    words = [Path(word).name for word in sys.orig_argv]
    if "forge" in words[:-1]:
        _hold(folder, words[words.index("forge") + 1])
    elif "forge.batch_step" in words:  # which runs the commands in forks
        from forge import cli

        main = cli.main

        def held() -> int:
            _hold(folder, sys.argv[1])
            return main()

        cli.main = held


def _hold(folder: Path, name: str) -> None:
    if (folder / f"{name}-hold").exists():
        (folder / f"{name}-waiting").touch()
        while not (folder / f"{name}-over").exists():
            time.sleep(0.02)


if "FORGE_TEST_CLOCK" in os.environ:
    _node, _ahead = os.environ["FORGE_TEST_CLOCK"].split("=")
    _set_clock(_node, float(_ahead))
if "FORGE_TEST_HOLD" in os.environ:
    _hold_commands(Path(os.environ["FORGE_TEST_HOLD"]))
if "FORGE_TEST_PAUSE" in os.environ:
    _arm()
