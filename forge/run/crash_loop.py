"""Crash-loop detection: end a run that restarts again and again without reaching a new step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from forge.core import events
from forge.core.errors import TrainingError
from forge.launch.stop_signal import PERSONS_CAUSES

# After these a person acts, so that what comes next is no repetition.
_ENDS = (events.Failed, events.Completed)
_SILENT = "it exited without a record: killed, or its node was lost"


def refuse_if_stuck(log: Path, step: int, limit: int) -> None:
    """TrainingError (70) when the last `limit` starts all began at `step`, the newest checkpoint's.

    Starts that a person ended (Ctrl-C, STOP file) or that were preempted do not count, and nothing
    that lies before an end that a person has seen.
    """
    starts = fruitless_starts(events.read(log), step)
    if len(starts) < limit:
        return
    reasons = "\n".join(f"    {number}. {reason}" for number, reason in enumerate(starts, 1))
    raise TrainingError(
        f"{len(starts)} starts in a row did not get beyond step {step}"
        f" (max_restarts_without_progress is {limit}):\n{reasons}",
        cause="each start meets the same trouble before its first checkpoint",
        fix="mend the trouble, or checkpoint more often (train.checkpoint_every,"
        " train.checkpoint_minutes); the same command then goes on",
    )


def fruitless_starts(log: Sequence[events.Event], step: int) -> list[str]:
    """How each of the last starts ended that began at `step`, oldest first."""
    starts: list[str] = []
    reason, counts = _SILENT, True
    for event in reversed(log):
        if isinstance(event, _ENDS):
            break
        if isinstance(event, events.Lost):
            reason = event.message
        elif isinstance(event, events.Requeue | events.Stop):
            reason, counts = event.cause, counts and event.cause not in PERSONS_CAUSES
        elif isinstance(event, events.Preempted):
            counts = False
        elif isinstance(event, events.Launch):
            if event.step != step:
                break
            if counts:
                starts.insert(0, f"{event.launch}: {reason}")
            reason, counts = _SILENT, True
    return starts
