"""The shutdown budget: does the final save, as measured, fit between the stop signal and the kill?"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from forge.core import events
from forge.core.errors import UnfitError
from forge.core.goodput import SaveTimes
from forge.core.paths import RunPaths
from forge.launch.rank_records import LaunchSpec
from forge.slurm import slurm

# The estimate for a run that has saved nothing yet: fp32 weights and optimizer state (12 bytes a weight),
# which all nodes write at once, each at half the rate that preflight has measured with a small file, else
# at 100 MB/s, which most disks and network file systems exceed.
UNMEASURED_SEC, BYTES_OF_WEIGHT, UNMEASURED_RATE, OF_MEASURED_RATE = 5.0, 12, 100e6, 0.5
# Added to what was measured: for the agreement of the ranks, a loaded file system, and process exit.
MARGIN_SEC, MARGIN = 5.0, 1.1
# Slurm checks time limits about twice a minute (sched_params), so its signal may be this late.
SLURM_LATE_SEC = 30.0
WARN_AGAIN = 1.5


@dataclass
class ShutdownBudget:
    """Time that a stop needs and time that is left, as rank 0 measures them. `deadline`: seconds since
    the epoch."""

    windows: dict[str, float]  # key of machine.yaml -> seconds between the stop signal and the kill
    deadline: float | None = None
    read_deadline: Callable[[], float | None] = lambda: None  # as Slurm has it now; None: unknown
    step_sec: float = 0.0
    evaluation_sec: float = 0.0
    saves: SaveTimes = field(default_factory=SaveTimes)
    estimated_save_sec: float = UNMEASURED_SEC  # for a run that has saved nothing yet
    in_flight: bool = False  # async_save: a stop may have to wait for the save that is under way
    steps_ahead: int = 0  # steps that are launched before the ranks read that one of them stops
    _warned: float = field(default=0.0, init=False)

    @classmethod
    def of(cls, spec: LaunchSpec, num_weights: int, *, steps_ahead: int = 0) -> ShutdownBudget:
        """The budget when a launch begins: the windows of machine.yaml and the end of the job."""
        task, machine, job = spec.train_task, spec.machine, spec.job
        log = events.read(RunPaths(Path(spec.run)).events)
        windows = {"stop_grace_sec": machine.stop_grace_sec}
        if job and machine.slurm.warn_sec:
            windows["slurm.warn_sec"] = machine.slurm.warn_sec - SLURM_LATE_SEC

        def read_deadline() -> float | None:
            with suppress(UnfitError):
                now = slurm.show_job(job, patience_sec=0, timeout_sec=5) if job else None
                if now and now.end_time:
                    return min(now.end_time, task.own_deadline or math.inf)
            return None

        return cls(
            windows,
            task.deadline,
            read_deadline,
            saves=SaveTimes(log),
            estimated_save_sec=_estimated_save_sec(log, spec.nodes, num_weights),
            in_flight=machine.async_save,
            steps_ahead=steps_ahead,
        )

    def measure_step(self, seconds: float) -> None:
        self.step_sec = max(self.step_sec, seconds)

    def measure_evaluation(self, seconds: float) -> None:
        self.evaluation_sec = max(self.evaluation_sec, seconds)

    @property
    def needed(self) -> float:
        """Seconds that a stop takes at worst: an evaluation, the step after it and those launched before
        the stop is read, the save that is under way, and the final save."""
        slowest = self.saves.slowest
        saves = self.estimated_save_sec if slowest is None else slowest
        if self.in_flight and self.saves.own:  # none is under way before the first
            saves *= 2
        steps = (1 + self.steps_ahead) * self.step_sec
        return (self.evaluation_sec + steps + saves) * MARGIN + MARGIN_SEC

    def is_due(self) -> bool:
        """Return whether training must stop now in order to end before the deadline."""
        if self.deadline is None or time.time() + self.needed < self.deadline:
            return False
        # The job's time limit may have been extended.
        self.deadline = self.read_deadline() or self.deadline
        return time.time() + self.needed >= self.deadline

    def warning(self) -> str:
        """A warning that a stop does not fit into its windows, with the settings that help. "" when it
        fits, and while the need has not grown by WARN_AGAIN since the last warning."""
        if not self.saves.own or self.needed <= self._warned * WARN_AGAIN:
            return ""
        short = {key: window for key, window in self.windows.items() if window < self.needed}
        if not short:
            return ""
        self._warned = self.needed
        given = ", ".join(f"{key} gives {window:g} s" for key, window in short.items())
        return (
            f"a stop may need {self.needed:.0f} s (an evaluation of {self.evaluation_sec:.1f} s, a"
            f" step of {self.step_sec:.1f} s, a save of {self.saves.slowest:.1f} s), but {given}: set"
            f" {' and '.join(short)} to {self.needed + SLURM_LATE_SEC:.0f} or more; where the site"
            " allows no more, a stop loses the steps since the last checkpoint, which"
            " train.checkpoint_minutes: auto keeps as few as is best"
        )


def _estimated_save_sec(log: Sequence[events.Event], nodes: int, num_weights: int) -> float:
    """Seconds of the first save of a run, from the rate that preflight has measured."""
    preflight = events.last(log, events.Preflight)
    measured = preflight.bytes_per_sec if isinstance(preflight, events.Preflight) else None
    rate = OF_MEASURED_RATE * measured if measured else UNMEASURED_RATE
    return UNMEASURED_SEC + BYTES_OF_WEIGHT * num_weights / (nodes * rate)
