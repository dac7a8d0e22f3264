"""Process that sends the numbers of a run to trackers: `python -m forge.plugins.tracking.feed RUN`.

The first line of its standard input has the section `tracking`, whose addresses may hold a password: the
words of a command are seen by all users of the node. A variable names the project's plugins, whose copies
it imports (`project_plugins.use_given`). It ends when all is sent after its standard input
was closed, or at once with its launcher. Each tracker has a thread of its own, so that one that hangs
delays no other.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from forge.core import project_plugins
from forge.core.errors import ConfigError, ForgeError, UnfitError
from forge.core.paths import RunPaths
from forge.core.process import stop_with_parent
from forge.core.terminal import begin_log, say, without_passwords, write
from forge.hosts.lock import lock
from forge.plugins.tracking.places import sent_folder
from forge.plugins.tracking.records import Sent
from forge.plugins.tracking.rows import Rows
from forge.plugins.tracking.settings import Tracking
from forge.plugins.tracking.to_mlflow import MLflow
from forge.plugins.tracking.to_tensorboard import TensorBoard
from forge.plugins.tracking.to_wandb import WeightsAndBiases
from forge.plugins.tracking.tracker import (
    TrackedRun,
    Tracker,
    missing_packages,
    refuse_missing_packages,
)

POLL_SEC = 5.0
RETRY_SEC = 60.0
LOCK_RETRY_SEC = 1.0
ROWS = 100  # that are logged at once
NICE = 19  # training comes first on every core


def trackers_of(
    tracking: Tracking, tell: Callable[[str], None], *, must_send: bool = False
) -> dict[str, Tracker]:
    """Name -> tracker, of all that are on. tell: takes what people should know of one. must_send: to the
    server, also where the settings would only record."""
    made: dict[str, Tracker] = {}
    if tracking.tensorboard:
        made["tensorboard"] = TensorBoard()
    if tracking.wandb:
        made["wandb"] = WeightsAndBiases(tracking.wandb, tell, must_send=must_send)
    if tracking.mlflow:
        made["mlflow"] = MLflow(tracking.mlflow)
    own: dict[str, Any] = tracking.of_plugins
    return made | {name: one.tracker() for name, one in own.items()}


@dataclass
class Feed:
    """Sends the rows of a run to one tracker."""

    name: str
    tracker: Tracker
    paths: RunPaths
    is_over: threading.Event = field(default_factory=threading.Event)
    """Set when training has ended: what is there is the rest."""

    def send(self) -> int:
        """Send rows until training is over and all are sent; the last step. Any exception may come from
        the tracker; what was not sent then is sent by the next call, of this process or of another."""
        path = sent_file(self.paths, self.name)
        sent = Sent.read_if_there(path) or Sent(id=secrets.token_hex(4))
        sent = sent.model_copy(update={"complete": False})
        sent.write(path)  # the id, before the tracker knows it
        sent = self.tracker.open(TrackedRun.read(self.paths), sent)
        sent.write(path)
        rows = Rows(self.paths)
        while True:
            is_over = self.is_over.is_set()
            new = (row for row in rows.new(is_over=is_over) if row.step > sent.step)
            while batch := list(islice(new, ROWS)):
                self.tracker.log(batch)
                sent = sent.model_copy(update={"step": batch[-1].step})
                sent.write(path)
            if is_over:
                self.tracker.finish(rows.state)
                sent.model_copy(update={"complete": True, "folder": ""}).write(path)
                return sent.step
            self.is_over.wait(POLL_SEC)

    def keep_sending(self, tell: Callable[[str], None]) -> None:
        """Call `send` until all is sent, again after failures of the tracker; the last attempt begins
        when training is over. A ForgeError ends the attempts. The first failure is printed."""
        has_warned = False
        while True:
            is_last = self.is_over.is_set()
            try:
                self.send()
                return
            except Exception as err:
                write(without_passwords(traceback.format_exc().rstrip()), sys.stderr)
                if not has_warned:
                    why = _in_a_line(err)
                    tell(f"warning: tracking.{self.name}: {why}; training is not affected")
                has_warned = True
                if isinstance(err, ForgeError) or is_last:
                    return
            self.is_over.wait(RETRY_SEC)


def _in_a_line(err: Exception) -> str:
    text = err.what if isinstance(err, ForgeError) else f"{type(err).__name__}: {err}"
    return " ".join(without_passwords(text).split())[:300]


def sent_file(paths: RunPaths, name: str) -> Path:
    return sent_folder(paths) / f"{name}.json"


def sync(runs: Sequence[tuple[RunPaths, Tracking]]) -> None:
    """`forge sync`: send everything that the trackers of these runs have not been sent, in this process.

    Raises ConfigError where a run has no tracker or a package is missing, before anything is sent.
    UnfitError where a tracker did not take everything, or another process sends, after all others were
    tried.
    """
    for paths, tracking in runs:
        _refuse_no_trackers(paths, tracking)
    failed: list[ForgeError] = []
    for paths, tracking in runs:
        try:
            with lock(sent_folder(paths), "sync"):
                failed += _send_rest(paths, tracking)
        except UnfitError as err:  # another process sends
            failed.append(err)
    if not failed:
        return
    *others, last = failed
    for other in others:
        say(f"error: {other}")
    raise last


def _refuse_no_trackers(paths: RunPaths, tracking: Tracking) -> None:
    if not tracking.trackers:
        raise ConfigError(
            f"{paths.root} has no trackers",
            fix="set the section tracking in config.yaml, or name the file that has it: --config FILE",
        )
    refuse_missing_packages(tracking, str(paths.root))


def _send_rest(paths: RunPaths, tracking: Tracking) -> Iterator[ForgeError]:
    """Send to each tracker of a run; the errors of those that failed."""
    for name, tracker in trackers_of(tracking, say, must_send=True).items():
        feed = Feed(name, tracker, paths)
        feed.is_over.set()
        where = f"{paths.root}: tracking.{name}"
        try:
            say(f"{paths.root}: sent to {name} up to step {feed.send()}")
        except UnfitError as err:
            yield UnfitError(f"{where}: {err.what}", cause=err.cause, fix=err.fix)
        except ForgeError as err:
            yield err
        except Exception as err:
            yield UnfitError(
                f"{where}: {_in_a_line(err)}",
                cause="no internet here, a wrong address, or no access",
                fix="run forge sync where the server can be reached; nothing was lost",
            )


# --- the process that runs while ranks train -------------------------------------------------------


def main(run: str) -> int:
    """Send until standard input ends, and then the rest. 69 where another process sent all the time."""
    stop_with_parent()
    parent = os.getppid()
    # A stop signal to the whole job is for the ranks: their last steps are to be sent, too.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(75) if os.getppid() != parent else None)
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICE)
    paths = RunPaths(Path(run))
    project_plugins.use_given()
    tracking = Tracking.model_validate(json.loads(sys.stdin.buffer.readline()))
    tell = _messages()
    is_over = threading.Event()
    threading.Thread(target=_wait_for_end, args=(is_over,), daemon=True).start()
    while True:
        try:
            with lock(sent_folder(paths), "tracking"):
                _send_all(paths, tracking, is_over, tell)
            return 0
        except (
            UnfitError
        ) as err:  # `forge sync`, or the process of a killed launcher, which ends soon
            if is_over.wait(LOCK_RETRY_SEC):
                tell(f"warning: tracking: {_in_a_line(err)}")
                return int(err.code)


def _messages() -> Callable[[str], None]:
    """Prints to standard error as it is now. From here on, libraries write to the log of this process,
    which is standard output."""
    terminal = os.fdopen(os.dup(2), "w", buffering=1)
    os.dup2(1, 2)
    begin_log(sys.stderr)

    def tell(message: str) -> None:
        say(message)  # into the log
        write(message, terminal)

    return tell


def _wait_for_end(is_over: threading.Event) -> None:
    sys.stdin.buffer.read()
    is_over.set()


def _send_all(
    paths: RunPaths, tracking: Tracking, is_over: threading.Event, tell: Callable[[str], None]
) -> None:
    on = tracking.model_copy(update=dict.fromkeys(missing_packages(tracking)))  # the launcher warns
    feeds = [Feed(name, tracker, paths, is_over) for name, tracker in trackers_of(on, tell).items()]
    threads = [threading.Thread(target=feed.keep_sending, args=(tell,)) for feed in feeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
