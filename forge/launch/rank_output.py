"""Show the lines and the progress of rank 0 at the launcher, through two small files."""

from __future__ import annotations

import contextlib
import json
import time
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from forge.core import terminal
from forge.core.terminal import Progress, say

LINES, BAR = "console", "progress.json"
BAR_EVERY_SEC = 0.2


def speak_to_launcher(folder: Path) -> None:
    """From now on what this rank says reaches the launcher too. Rank 0."""
    terminal.copy_to(open(folder / LINES, "a", buffering=1))  # noqa: SIM115  until the process ends


class RankProgress:
    """A Progress whose bar is drawn by the launcher."""

    def __init__(self, folder: Path, label: str, total: float, unit: str) -> None:
        self._file, self._last = folder / BAR, 0.0
        self._facts = {"label": label, "total": total, "unit": unit}

    def __call__(self, done: float, note: str = "") -> None:
        if time.monotonic() - self._last < BAR_EVERY_SEC and done < self._facts["total"]:  # type: ignore[operator]
            return
        self._last = time.monotonic()
        draft = self._file.with_suffix(".new")
        with contextlib.suppress(OSError):  # a bar that cannot move on a full disk ends nothing
            draft.write_text(json.dumps({**self._facts, "done": done, "note": note}))
            draft.replace(self._file)


class Console:
    """The launcher's end: `show` prints what is new."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._shown, self._bar_facts = folder, 0, ""
        self._stack = ExitStack()
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.show()
        self._stack.close()

    def show(self) -> None:
        lines = self._folder / LINES
        if lines.exists():
            # Bytes, not text: what is there may end in the middle of a character.
            with open(lines, "rb") as file:
                file.seek(self._shown)
                whole, newline, _ = file.read().rpartition(b"\n")
            self._shown += len(whole + newline)
            for line in whole.decode(errors="replace").splitlines():
                say(line)
        self._show_bar()

    def _show_bar(self) -> None:
        bar = self._folder / BAR
        if not bar.exists() or (text := bar.read_text()) == self._bar_facts:
            return
        self._bar_facts, facts = text, json.loads(text)
        if self._bar is None:
            opened: AbstractContextManager[Progress] = terminal.progress(
                facts["label"], facts["total"], facts["unit"]
            )
            self._bar = self._stack.enter_context(opened)
        self._bar(facts["done"], facts["note"])
