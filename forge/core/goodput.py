"""Model of goodput: which share of its wall time does an interrupted run train, and how often should it
save? Pure functions; all times in seconds.

An event interrupts the run every `between_events` seconds of wall time in the mean, and costs a restart.
A share of the events leaves time for a checkpoint (a notice of preemption, a time limit). The others also
cost the steps since the last checkpoint, half an interval in the mean, and the time until it is detected.
"""

from __future__ import annotations

import math


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
    arXiv 2410.21680, section III, where no event is saved in time.

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
