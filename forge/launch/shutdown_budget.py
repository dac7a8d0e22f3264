"""Shutdown budget: do a final step and save, as measured, fit into the time that is left?"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from forge.cluster import slurm
from forge.core.errors import UnfitError
from forge.launch.rank_records import LaunchSpec

# A save that was never measured is taken to need this: fp32 weights and two moments at 100 MB/s, which
# most disks exceed.
UNMEASURED_SEC, UNMEASURED_SEC_PER_WEIGHT = 5.0, 12 / 100e6
# Beyond what was measured: ranks that agree, a loaded file system, the way out.
MARGIN_SEC, MARGIN = 5.0, 1.1
# Slurm looks at time limits about twice a minute (sched_params), so its warning may be this late.
SLURM_LATE_SEC = 30.0
# What saving may cost of the time of training where people ask for an interval.
SAVE_SHARE = 0.02
WARN_AGAIN = 1.5


@dataclass
class Grace:
    """Rank 0's view of time. All numbers are seconds; `deadline` is seconds since the epoch."""

    windows: dict[str, float]  # key of machine.yaml -> how long before the end a stop is announced
    deadline: float | None = None
    ask_again: Callable[[], float | None] = lambda: (
        None
    )  # the deadline as it is now, if it has moved
    step_sec: float = 0.0
    evaluation_sec: float = 0.0
    save_sec: float | None = None
    stall_sec: float = 0.0
    num_weights: int = 0
    in_flight: bool = False  # saves go on beside training: a stop may have to wait for one
    _warned: float = field(default=0.0, init=False)

    @classmethod
    def of(cls, spec: LaunchSpec, num_weights: int) -> Grace:
        """What is known at the start of a launch: the windows of machine.yaml, and the job's end."""
        task, machine, job = spec.train_task, spec.machine, spec.job
        windows = {"stop_grace_sec": machine.stop_grace_sec}
        if job and machine.slurm.warn_sec:
            windows["slurm.warn_sec"] = machine.slurm.warn_sec - SLURM_LATE_SEC

        def ask_again() -> float | None:
            with suppress(UnfitError):
                now = slurm.show_job(job, patience_sec=0, timeout_sec=5) if job else None
                if now and now.end_time:
                    return min(now.end_time, task.own_deadline or math.inf)
            return None

        return cls(
            windows,
            task.deadline,
            ask_again,
            num_weights=num_weights,
            in_flight=machine.async_save,
        )

    def measure_step(self, seconds: float) -> None:
        self.step_sec = max(self.step_sec, seconds)

    def measure_evaluation(self, seconds: float) -> None:
        self.evaluation_sec = max(self.evaluation_sec, seconds)

    def measure_save(self, seconds: float, stall: float) -> None:
        """A save that took `seconds` from begin to commit, and stopped training for `stall`."""
        self.save_sec = max(self.save_sec or 0.0, seconds)
        self.stall_sec = max(self.stall_sec, stall)

    @property
    def needed(self) -> float:
        """What a stop takes at worst: an evaluation and the step after it, the save under way, the last
        save."""
        if self.save_sec is None:
            saves = UNMEASURED_SEC + UNMEASURED_SEC_PER_WEIGHT * self.num_weights
        else:
            saves = self.save_sec * (2 if self.in_flight else 1)
        return (self.evaluation_sec + self.step_sec + saves) * MARGIN + MARGIN_SEC

    def is_due(self) -> bool:
        """Whether training must stop now to be through before the deadline."""
        if self.deadline is None or time.time() + self.needed < self.deadline:
            return False
        # A limit that was extended meanwhile is worth a question.
        self.deadline = self.ask_again() or self.deadline
        return time.time() + self.needed >= self.deadline

    def warning(self) -> str:
        """What to tell people, once for a need: a stop that does not fit into its window, and the
        settings that help; "" when all is well."""
        if self.save_sec is None or self.needed <= self._warned * WARN_AGAIN:
            return ""
        short = {key: window for key, window in self.windows.items() if window < self.needed}
        if not short:
            return ""
        self._warned = self.needed
        given = ", ".join(f"{key} gives {window:g} s" for key, window in short.items())
        minutes = max(self.stall_sec / SAVE_SHARE, 2 * self.save_sec) / 60
        return (
            f"a stop may need {self.needed:.0f} s here (an evaluation of {self.evaluation_sec:.1f} s, a"
            f" step of {self.step_sec:.1f} s, a save of {self.save_sec:.1f} s), {given}: set"
            f" {' and '.join(short)} to {self.needed + SLURM_LATE_SEC:.0f} or more; where the site"
            " gives no more, a stop loses the steps since the last checkpoint: set"
            f" train.checkpoint_minutes to {max(minutes, 0.1):.1f}"
        )
