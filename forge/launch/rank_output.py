"""Messages and progress of rank 0 on the launcher's terminal, passed on in two small files."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Self

from forge.core import terminal
from forge.core.errors import UnfitError
from forge.core.files import inodes_in
from forge.core.json_lines import Follower
from forge.core.terminal import Progress, say, unstamped

MESSAGES, BAR = "console", "progress.json"
START = (
    "console.start"  # bytes of the messages that are not shown; of a log that is longer than them
)
BAR_EVERY_SEC = 0.2
_COLOR = re.compile("\x1b\\[[0-9;]*m")


def send_log(folder: Path, log: Path) -> None:
    """Let the launcher show this log from its end on, in place of messages. Called by rank 0."""
    draft, link = folder / f"{START}.new", folder / f"{MESSAGES}.new"
    with contextlib.suppress(OSError):  # on a full disk nothing is shown
        draft.write_text(str(log.stat().st_size))
        draft.replace(folder / START)  # complete when the launcher finds it
        link.symlink_to(log)
        link.replace(folder / MESSAGES)  # the launcher finds one or the other, never none


def speak_to_launcher(folder: Path) -> None:
    """Also send all messages of this rank to the launcher. Called by rank 0."""
    terminal.copy_to(open(folder / MESSAGES, "a", buffering=1))  # noqa: SIM115  until the process ends


class RankProgress:
    """A Progress that the launcher displays."""

    def __init__(self, folder: Path, label: str, total: float, unit: str) -> None:
        self._file, self._last = folder / BAR, 0.0
        self._facts = {"label": label, "total": total, "unit": unit}

    def __call__(self, done: float, note: str = "") -> None:
        if time.monotonic() - self._last < BAR_EVERY_SEC and done < self._facts["total"]:  # type: ignore[operator]
            return
        self._last = time.monotonic()
        draft = self._file.with_suffix(".new")
        with contextlib.suppress(OSError):  # on a full disk the bar stands still
            draft.write_text(json.dumps({**self._facts, "done": done, "note": note}))
            draft.replace(self._file)


class Bar:
    """The reader's side of RankProgress. folder: of a launch."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / BAR
        self._seen = (0, 0, 0)  # inode, time and size of the file that is shown
        self._stack = ExitStack()
        self._bar: Progress | None = None

    def show(self) -> None:
        """Show what the file says now. Raises OSError where it is not there."""
        stat = self._file.stat()  # replaced often: its inode may be that of an earlier one
        if (seen := (stat.st_ino, stat.st_mtime_ns, stat.st_size)) == self._seen:
            return
        facts, self._seen = json.loads(self._file.read_text()), seen
        if self._bar is None:
            opened: AbstractContextManager[Progress] = terminal.progress(
                facts["label"], facts["total"], facts["unit"]
            )
            self._bar = self._stack.enter_context(opened)
        self._bar(facts["done"], facts["note"])

    def close(self) -> None:
        self._stack.close()


@contextlib.contextmanager
def shown_bar(launches: Path) -> Iterator[None]:
    """While it is entered, show the progress of a training whose command runs in another process, whose
    output is kept from the terminal. launches: directory of its launches."""
    ended = threading.Event()

    def follow() -> None:
        launch, bar = launches, Bar(launches)
        while not ended.wait(BAR_EVERY_SEC):
            with contextlib.suppress(OSError):  # before the first step, and at the end of a launch
                begun = sorted(launches.iterdir(), key=lambda one: one.stat().st_mtime_ns)
                newest = begun[-1] if begun else launches
                if newest != launch:
                    bar.close()
                    launch, bar = newest, Bar(newest)
                bar.show()
        bar.close()

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    try:
        yield
    finally:
        ended.set()
        follower.join()


class Console:
    """The launcher's side: `show` prints what rank 0 has written since the last call."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._messages: Follower | None = None
        self._is_log = False
        self._bar = Bar(folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.show()
        self._bar.close()

    def show(self, inodes: Mapping[str, int] | None = None) -> None:
        """inodes: of the files in the directory, where the caller has read it just now."""
        inodes = inodes_in(self._folder) if inodes is None else inodes
        # Training goes on where nothing can be shown: the next call tries again. A follower raises
        # UnfitError for errors of a disk.
        with contextlib.suppress(OSError, UnfitError):
            self._show_messages(inodes)
            if BAR in inodes:
                self._bar.show()

    def _show_messages(self, inodes: Mapping[str, int]) -> None:
        path, start = self._folder / MESSAGES, self._folder / START
        if not self._is_log and START in inodes:  # the log of rank 0 takes the place of messages
            self._messages, self._is_log = Follower(path, int(start.read_text())), True
        if self._messages is None and MESSAGES in inodes:
            self._messages = Follower(path)
        while self._messages and (lines := self._messages.new_lines()):
            for line in lines:
                # Another program may draw progress bars over each other, and colors of its own.
                say(unstamped(_COLOR.sub("", line.rstrip().rpartition("\r")[2]))[1])
