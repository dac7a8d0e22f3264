"""Model of goodput: which share of its wall time does an interrupted run train, and how often should it
save? Pure functions; all times in seconds.

An event interrupts the run every `between_events` seconds of wall time in the mean, and costs a restart.
A share of the events leaves time for a checkpoint (a notice of preemption, a time limit). The others also
cost the steps since the last checkpoint, half an interval in the mean, and the time until it is detected.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median

from forge.core.events import Event, Save
from forge.core.records import RecordPart
from forge.core.terminal import duration

# Where nothing is known: one event in a day. arXiv 2410.21680 has one failure in 7.9 h on 1,024 GPUs: one
# in a day on 340.
ASSUMED_SEC = 24 * 3600.0
# The mean of a few minutes says little: it is that of what was seen, and so long more without an event.
UNSEEN_SEC = 3600.0
RESTART_SEC = 60.0  # down time of an event, before one was measured
DETECTION_SEC = (
    30.0  # a killed rank is noticed within seconds, a dead node or a hang within minutes
)
STALL_SEC = 5.0  # of a save, in forecasts for runs that have saved nothing yet
RECENT_SAVES = 3
# Limits of an automatic interval: an event costs an hour at most, and 10 s are little enough; training
# waits for saves a tenth of the time at most, and each is committed long before the next.
MIN_INTERVAL_SEC, MAX_INTERVAL_SEC, STALLS, SAVES = 10.0, 3600.0, 10, 2


def ettr(
    interval: float,
    *,
    stall: float,
    restart: float,
    detection: float,
    between_events: float,
    saved_share: float,
) -> float:
    """Effective training time ratio, in [0, 1]: the time of steps that count over the wall time. As in
    arXiv 2410.21680, where no event is saved in time.

    interval: from the end of a save to the start of the next. stall: for which training waits for a save.
    restart: from the end of a launch to the first step of the next, with the queue. detection: from an
    event that is not saved in time to the end of its launch. between_events: mean; inf for none.
    saved_share: of the events, in [0, 1]. Of first order in interval / between_events.
    """
    lost = restart + (1 - saved_share) * (interval / 2 + detection)
    return interval / (interval + stall) * max(0.0, 1 - lost / between_events)


def best_interval(*, stall: float, between_events: float, saved_share: float = 0.0) -> float:
    """The interval with the highest `ettr`, by Young's formula (Communications of the ACM 17, 1974, page
    530): sqrt(2 stall between_events / (1 - saved_share)); inf where no event costs steps.

    For short stalls it is that of arXiv 2410.18124, s + sqrt(2 (F + R) s + s²), where only the events
    that are not saved in time count as failures: F = between_events / (1 - saved_share).
    """
    if saved_share >= 1:
        return math.inf
    return math.sqrt(2 * stall * between_events / (1 - saved_share))


class SaveTimes:
    """Cost of the saves of a run: of this launch's (`own`, to which it appends each), or of the last ones
    before it until there is one."""

    def __init__(self, log: Iterable[Event] = ()) -> None:
        """log: before this launch. Times that were edited into what no time can be are left out."""
        saves = [event for event in log if isinstance(event, Save)]
        possible = [s for s in saves if 0 <= s.stall < math.inf and 0 <= s.seconds < math.inf]
        self._before, self.own = possible[-RECENT_SAVES:], list[Save]()

    @property
    def cost(self) -> tuple[float, float] | None:
        """Seconds for which training waits for a save, and that the save takes: medians of the last ones.
        None before the first save of the run."""
        if not (recent := (self.own or self._before)[-RECENT_SAVES:]):
            return None
        return median(save.stall for save in recent), median(save.seconds for save in recent)

    @property
    def slowest(self) -> float | None:
        """Seconds that the slowest one takes; None before the first save of the run."""
        return max((save.seconds for save in self.own or self._before), default=None)


class Interruptions(RecordPart):
    """Interruptions of runs here, as far as they are known. Times in seconds.

    number: of events, in launches and jobs that lasted `seconds` together. saved, not_saved: of these
    events, those of which an event log says whether a checkpoint was saved in time. restart: median time
    from the end of a launch to the first step of the next; None: not measured yet.
    """

    number: int = 0
    seconds: float = 0.0
    saved: int = 0
    not_saved: int = 0
    restart: float | None = None

    @property
    def between_events(self) -> float:
        """While launches run: the mean of what was seen and UNSEEN_SEC without an event, or with one
        event in ASSUMED_SEC beside it if that is shorter. A site where nothing has happened yet is not
        one where nothing will; one where much happens needs no day to show it, but more than a minute."""
        with_assumed = (self.seconds + ASSUMED_SEC) / (self.number + 1)
        seen = (self.seconds + UNSEEN_SEC) / self.number if self.number else math.inf
        return min(seen, with_assumed)

    @property
    def saved_share(self) -> float:
        """Share of the events before which a checkpoint was saved in time, counted with one event more
        that was not: never 1, and 0 where nothing is known."""
        return self.saved / (self.saved + self.not_saved + 1)

    def after(self, seconds: float) -> Interruptions:
        """The same after so many seconds more in which nothing happened."""
        return self.model_copy(update={"seconds": self.seconds + seconds})

    def ettr(self, interval: float, stall: float) -> float:
        """The forecast for a run that saves so often, and waits for so long each time. Events are counted
        while launches run; so one is a restart longer from the next on the wall clock."""
        restart = RESTART_SEC if self.restart is None else self.restart
        return ettr(
            interval,
            stall=stall,
            restart=restart,
            detection=DETECTION_SEC,
            between_events=self.between_events + restart,
            saved_share=self.saved_share,
        )

    def interval(self, stall: float, save: float) -> float:
        """The best interval within its limits: at most MAX_INTERVAL_SEC; saves take at most a tenth of
        the time, and a save is committed long before the next. stall, save: how long training waits for
        a save, and how long that takes."""
        best = best_interval(
            stall=stall, between_events=self.between_events, saved_share=self.saved_share
        )
        return max(MIN_INTERVAL_SEC, STALLS * stall, SAVES * save, min(best, MAX_INTERVAL_SEC))

    def __str__(self) -> str:
        """For people."""
        if not self.number:
            seen = f"in {duration(self.seconds, precise=True)}" if self.seconds else "known"
            return f"no interruption {seen}: assumes one in {self.between_events / 3600:.0f} h"
        several = "s" * (self.number > 1)
        known = self.saved + self.not_saved
        told = f", {self.saved} of {known} with time for a save" if known else ""
        down = "" if self.restart is None else f", {duration(self.restart, precise=True)} down each"
        seconds = duration(self.seconds, precise=True)
        return f"{self.number} interruption{several} in {seconds}{told}{down}"
