"""Stop requests (signal or STOP file), kept as a flag until all ranks agree to stop."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path
from types import FrameType

# In order of rising weight: when ranks saw different causes, the heaviest is everybody's.
CAUSES = ("", "deadline", "STOP file", "SIGUSR1", "SIGTERM", "Ctrl-C")
PERSONS_CAUSES = ("STOP file", "Ctrl-C")

SIGNAL_CAUSES = {
    signal.SIGUSR1: "SIGUSR1",
    signal.SIGTERM: "SIGTERM",
    signal.SIGINT: "Ctrl-C",
}


class StopFlag:
    """Set by the first stop signal; later ones change nothing and never kill a save.

    The handlers stay until the process ends.
    """

    def __init__(self, stop_file: Path | None = None) -> None:
        self._cause = ""
        self._stop_file = stop_file

    def install(self) -> StopFlag:
        """Handle the stop signals from now on. Main thread only."""
        for number in SIGNAL_CAUSES:
            signal.signal(number, self._on_signal)
        return self

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._cause = self._cause or SIGNAL_CAUSES[signal.Signals(number)]

    def cause(self) -> str:
        """Why to stop, one of CAUSES; "" to go on."""
        with suppress(OSError):  # a network file system with a hiccup is asked again a step later
            if not self._cause and self._stop_file and self._stop_file.exists():
                self._cause = "STOP file"
        return self._cause
