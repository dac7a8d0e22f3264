"""Crash-loop detection: end a run that is launched again and again without a new checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from forge.core import events
from forge.core.errors import TrainingError
from forge.run.launches import LaunchHistory, launches_of

_NO_END = "no end is recorded: it was killed, its node was lost, or a disk was full"


def refuse_if_stuck(log: Path, step: int, limit: int) -> None:
    """TrainingError (70) when the last `limit` launches all began at `step`, the newest checkpoint's.

    Launches that the user stopped (Ctrl-C, STOP file) or Slurm preempted do not count, nor do those
    before a failure or completion of the run.
    """
    launches = launches_without_progress(events.read(log), step)
    if len(launches) < limit:
        return
    reasons = "\n".join(f"    {number}. {reason}" for number, reason in enumerate(launches, 1))
    raise TrainingError(
        f"{len(launches)} launches in a row did not get beyond step {step}"
        f" (max_restarts_without_progress is {limit}):\n{reasons}",
        cause="each launch fails in the same way before its first checkpoint",
        fix="fix the cause, or checkpoint more often (train.checkpoint_every,"
        " train.checkpoint_minutes); then rerun the same command",
    )


def launches_without_progress(log: Sequence[events.Event], step: int) -> list[str]:
    """Name and end of each of the last launches that began at `step`, oldest first."""
    launches: list[str] = []
    for launch in reversed(launches_of(log)):
        # After an end that is final the user has acted: earlier launches do not count.
        if launch.is_final or launch.begun is None or launch.begun.step != step:
            break
        if not launch.first(events.Preempted) and not any(end.by_person for end in launch.ends):
            launches.insert(0, f"{launch.id}: {_why(launch)}")
    return launches


def _why(launch: LaunchHistory) -> str:
    """The end of a launch; after a full disk, which is waited for, only what its ranks have recorded."""
    if launch.ending:
        return launch.ending.text
    error = launch.first(events.RankError)
    return error.message.split("\n")[0] if error else _NO_END
