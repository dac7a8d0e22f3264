"""Heartbeat of this rank: what its main thread does, and since when. No torch."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

# A rank is stalled after so many times its slowest step, but not before the seconds below. Evaluations
# and saves count to the step in which they fall, so that a rank that only waits for them is not stalled.
SLOWEST_STEPS = 10.0
SHORTEST_STALL_SEC = 30.0
# Share of the timeout of a collective: a stalled rank says where it is before the others give up on it.
SHARE_OF_TIMEOUT = 0.5


@dataclass(frozen=True)
class LastCollectives:
    """The numbers of the last collectives of a rank in one process group, counted by torch; -1 for none.
    started: on the device; -1 also where torch does not note it, as with Gloo."""

    group: str
    enqueued: int
    started: int
    completed: int

    @property
    def begun(self) -> int:
        """The last collective that this rank has come to, as far as torch notes it."""
        return self.started if self.started >= 0 else self.enqueued

    @property
    def in_progress(self) -> bool:
        """Return whether the rank is in a collective, and waits for other ranks there."""
        return self.begun > self.completed


@dataclass(frozen=True)
class Activity:
    """The work of a rank at one moment."""

    step: int  # that it trains, from 1; 0 before the first step of a launch
    phase: str  # the name of a collective, or of work of its own
    waits: bool  # whether the phase is a collective, in which it waits for other ranks
    sec: float  # for how long, in seconds
    stalled: bool  # whether that is longer than the rank's limit
    # Whether Slurm's controller then responded to this node; None: it was not asked.
    reaches_slurm: bool | None = None
    collectives: tuple[LastCollectives, ...] = ()  # in this stall

    @property
    def where(self) -> str:
        """The phase and its seconds, for messages."""
        return f"in the {self.phase} for {self.sec:.0f} s"


class Heartbeat:
    """Step and phase of this rank's main thread. What other threads report is ignored: a hung main thread
    is not alive because a checkpoint is being written beside it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds, from any origin."""
        self.timeout_sec = math.inf  # of a collective
        self.reaches_slurm: bool | None = None  # in this stall, see Activity
        self.collectives: tuple[LastCollectives, ...] = ()  # the same
        self._clock = clock
        self._step, self._step_began, self._slowest_sec = 0, math.nan, 0.0
        self._now = ("start", False, clock())  # replaced as one, since the watchdog reads it

    def beat(self, phase: str, *, waits: bool = False) -> None:
        """The main thread begins this phase. waits: for other ranks, in a collective."""
        if threading.current_thread() is threading.main_thread():
            self._now = (phase, waits, self._clock())

    def begin_step(self, step: int) -> None:
        """The main thread begins to read the batch of this step, counted from 1."""
        now = self._clock()
        if self._step > 0:
            self._slowest_sec = max(self._slowest_sec, now - self._step_began)
        self._step, self._step_began = step, now
        self.beat(f"data read of step {step}")

    @property
    def limit_sec(self) -> float:
        """Seconds in one phase after which this rank is stalled."""
        own = max(SHORTEST_STALL_SEC, SLOWEST_STEPS * self._slowest_sec)
        return min(own, SHARE_OF_TIMEOUT * self.timeout_sec)

    @property
    def activity(self) -> Activity:
        """The work of the main thread at this moment."""
        phase, waits, since = self._now
        sec = self._clock() - since
        stalled = sec >= self.limit_sec
        seen = (self.reaches_slurm, self.collectives)
        return Activity(self._step, phase, waits, round(sec, 1), stalled, *seen)


heartbeat = Heartbeat()
"""The heartbeat of this process."""
