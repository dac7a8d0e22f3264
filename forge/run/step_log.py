"""Write the steps that another program tells by its heartbeats to metrics.jsonl. Status, rate and badput
of the run come from there, as for Forge's own trainer."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from forge.core import events
from forge.core.paths import RunPaths
from forge.trainer import metrics
from forge.trainer.metrics import StepLine

EVERY_SEC = 5.0


@dataclass
class StepLog:
    """The step log of one launch. The launcher calls it each time that it looks at the ranks."""

    paths: RunPaths
    _step: int = field(default=-1, init=False)
    _written: float = field(default=float("-inf"), init=False)

    def tell(self, steps: list[int | None], *, is_last: bool) -> None:
        """Write the last step that all ranks have reached, at most every EVERY_SEC; the last step at
        once. Raises UnfitError when the disk cannot be written."""
        reached = [step for step in steps if step is not None]
        now = time.monotonic()
        if len(reached) < len(steps) or not reached or min(reached) <= self._step:
            return
        if now - self._written < EVERY_SEC and not is_last:
            return
        launch = events.last(events.read(self.paths.events), events.Launch)
        if isinstance(launch, events.Launch):
            self._step, self._written = min(reached), now
            metrics.write(self.paths.metrics, StepLine(launch=launch.launch, step=self._step))
