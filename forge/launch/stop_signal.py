"""Stop requests (signal or STOP file), kept as a flag until all ranks agree to stop."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path
from types import FrameType

SIGNAL_CAUSES = {
    signal.SIGUSR1: "SIGUSR1",
    signal.SIGTERM: "SIGTERM",
    signal.SIGINT: "Ctrl-C",
}


class StopFlag:
    """Set by the first stop signal; later signals are ignored, so that none interrupts a save.

    The handlers stay installed until the process exits.
    """

    def __init__(self, stop_file: Path | None = None) -> None:
        self._cause = ""
        self.stop_file = stop_file

    def install(self) -> StopFlag:
        """Install the signal handlers. Main thread only."""
        for number in SIGNAL_CAUSES:
            signal.signal(number, self._on_signal)
        return self

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._cause = self._cause or SIGNAL_CAUSES[signal.Signals(number)]

    def cause(self) -> str:
        """Why to stop, one of events.STOP_CAUSES; "" to continue."""
        with suppress(OSError):  # a network file system that fails once is read again a step later
            if not self._cause and self.stop_file and self.stop_file.exists():
                self._cause = "STOP file"
        return self._cause
