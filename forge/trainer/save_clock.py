"""Clock for the next checkpoint due by time (train.checkpoint_minutes). Rank 0 asks for all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from forge.core.events import Forecast
from forge.core.goodput import Interruptions, SaveTimes
from forge.core.terminal import duration

# With `auto`, until a save was measured: the first one tells what all others cost.
FIRST_SEC = 60.0
# From which on a change is told: of the interval by this factor, of the goodput that is expected by this
# difference.
TOLD_CHANGE, TOLD_DIFFERENCE = 1.25, 0.05


class SaveClock:
    """Counts the time since the last save, and chooses the interval for `auto`."""

    def __init__(
        self,
        minutes: float | Literal["auto"] | None,
        known: Interruptions,
        saves: SaveTimes,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """known: of interruptions before this launch."""
        self.is_auto = minutes == "auto"
        self._fixed = 60.0 * minutes if isinstance(minutes, int | float) else None
        self._known, self._saves, self._now, self._began = known, saves, now, now()
        self._saved_at = self._began
        self._told: Forecast | None = None

    @property
    def interval(self) -> float | None:
        """Seconds between two saves; None where they are due by steps only."""
        if not self.is_auto:
            return self._fixed
        if (cost := self._saves.cost) is None:
            return FIRST_SEC
        return self._known_now.interval(*cost)

    def is_due(self) -> bool:
        interval = self.interval
        return interval is not None and self._now() - self._saved_at > interval

    def begin(self) -> None:
        """A save has begun, and training goes on."""
        self._saved_at = self._now()

    def changed(self, step: int) -> Forecast | None:
        """With `auto`, the interval and what is expected of it, where either has changed since this was
        last given, as TOLD_CHANGE says; else None. step: for the event log."""
        cost = self._saves.cost
        if not self.is_auto or cost is None:
            return None
        (stall, save), known = cost, self._known_now
        interval = known.interval(stall, save)
        ettr, told = known.ettr(interval, stall), self._told
        is_alike = told and told.interval / TOLD_CHANGE < interval < told.interval * TOLD_CHANGE
        if told and is_alike and abs(ettr - told.ettr) < TOLD_DIFFERENCE:
            return None
        self._told = Forecast(
            step=step,
            interval=round(interval, 3),
            stall=round(stall, 3),
            ettr=round(ettr, 4),
            basis=str(known),
        )
        return self._told

    @property
    def _known_now(self) -> Interruptions:
        return self._known.after(self._now() - self._began)


def told(forecast: Forecast) -> str:
    """The interval for people."""
    return (
        f"a checkpoint every {duration(forecast.interval, precise=True)} (train.checkpoint_minutes:"
        f" auto; a save stalls training for {duration(forecast.stall, precise=True)};"
        f" {forecast.basis})"
    )
