"""The event log of a run (events.jsonl): one class for each kind of event, written and read here only.

The log is append-only and spans all restarts of the run. An event is named as its class, in lower case.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from forge.core import json_lines
from forge.core.errors import USE_THAT_VERSION, ForgeError, OtherFormat
from forge.core.files import disk_trouble

FORMAT = 1


class Event(BaseModel):
    """Fields of every event. time: when it was recorded, in seconds since the epoch."""

    # defer_build: a command uses few of the classes, and building all of them slows its start.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)

    format: int = FORMAT
    time: float = Field(default_factory=lambda: round(time.time(), 3))

    @property
    def event(self) -> str:
        """The name of this kind of event in the log."""
        return type(self).__name__.lower()


class Timed(Event):
    """An event at the end of an action that took `seconds`."""

    seconds: float


# --- before the ranks start ------------------------------------------------------------------------


class Stage(Timed):
    """`forge stage` has ended. bytes, digest: of shards, or of a program's inputs. sent: the nodes that
    got a copy."""

    bytes: int
    digest: str
    folders: dict[str, str]  # node -> directory that its ranks read
    sent: list[str]


class Preflight(Timed):
    """`forge preflight` has ended. failed: names of checks. nodes: those that train, if it passed."""

    status: Literal["ok", "failed"]
    failed: list[str]
    nodes: list[str]
    left_out: dict[str, str]  # node -> why
    bytes_per_sec: float | None = (
        None  # of the slowest node, when all wrote into the run's directory
    )


# --- one launch of the ranks -----------------------------------------------------------------------


class Launch(Event):
    """The launcher starts the ranks. step: of the checkpoint that they resume from. job, restart: the
    Slurm job and its restart count; None outside of Slurm."""

    launch: str
    world_size: int
    launcher: str
    host: str
    nodes: list[str]
    step: int
    job: str | None = None
    restart: int | None = None


class Init(Timed):
    """The ranks are ready to train. seconds: since their launch. numerics: all settings besides weights
    and data on which the last bits of a loss depend. why_not_compiled: the reason for
    blocks that are not; "" where they are."""

    launch: str
    step: int
    world_size: int
    parameters: int
    versions: dict[str, str]
    numerics: dict[str, Any]
    why_not_compiled: str = ""


class Eval(Timed):
    """The validation loss was measured. sources: of each source, for a run with sources; `loss` is then
    their mean by the weights of the mix. bpb: the loss in bits per byte of text, None where bytes are not
    known; bpb_estimated: these were estimated by the vocabulary."""

    step: int
    loss: float  # nats per token
    sources: dict[str, float] | None = None
    bpb: float | None = None
    bpb_estimated: bool | None = None


class Save(Timed):
    """A checkpoint was committed. seconds: from the start of the save to its commit. stall: the seconds
    for which training waited. digest: of its manifest or seal, which proves of a pruned checkpoint what
    it was; "" in logs of before there was this key."""

    step: int
    stall: float
    bytes: int
    digest: str = ""


class Skipped(Event):
    """A step without an update, because its loss or gradients were not finite, or a spike."""

    step: int
    in_a_row: int
    reason: str


class Budget(Event):
    """The shutdown budget may be too small for the final save. needed: seconds."""

    needed: float


class Forecast(Event):
    """The interval between checkpoints was chosen, or has changed (train.checkpoint_minutes: auto).
    interval, stall: seconds. ettr: the goodput that is expected, in [0, 1]. basis: what is known of
    interruptions, for people."""

    step: int
    interval: float
    stall: float
    ettr: float
    basis: str


class Quarantine(Event):
    """A corrupt checkpoint was moved to quarantine/."""

    checkpoint: str
    reasons: list[str]


# --- the end of a launch ---------------------------------------------------------------------------


class Completed(Event):
    """The run has reached train.max_steps."""

    step: int
    weights_digest: str


class Stop(Event):
    """All ranks agreed to stop. cause: one of stop_signal.CAUSES. step: of the newest checkpoint."""

    cause: str
    step: int


class RankError(Event):
    """Ranks of a launch ended with this message, in which numbers may differ. host: of the first."""

    ranks: list[int]
    host: str
    message: str


class Lost(Event):
    """A rank exited without a record, or hung. silent: unresponsive nodes, which start no process any
    more."""

    message: str
    attempt: int
    silent: list[str]


class Failed(Event):
    """Training failed with this exit code. diverged: a rerun with this config would fail again."""

    code: int
    rank: int
    message: str
    diverged: bool
    config_digest: str


class Preempted(Event):
    """Slurm preempted the job."""

    job: str
    step: int


class Requeue(Event):
    """Forge requeues the job."""

    job: str
    cause: str
    step: int


# --- validation ------------------------------------------------------------------------------------


class Validate(Timed):
    """`forge validate` has ended."""

    status: str
    step: int


_KINDS = {
    kind.__name__.lower(): kind
    for kind in (*Event.__subclasses__(), *Timed.__subclasses__())
    if kind is not Timed
}


def record(log: Path, event: Event) -> None:
    """Append an event to a run's log. Raises UnfitError when the disk cannot be written."""
    with disk_trouble(log):
        log.parent.mkdir(parents=True, exist_ok=True)
    json_lines.append(
        log, {"event": event.event, **event.model_dump(mode="json", exclude_none=True)}
    )


def read(log: Path) -> list[Event]:
    """All events of a run, oldest first. Lines that were cut by a crash or edited are skipped.

    Raises OtherFormat when another version of Forge wrote the log.
    """
    return [event for line in json_lines.lines(log) if (event := parse(line, log)) is not None]


def trained_nodes(log: Path) -> set[str]:
    """Names of the nodes on which ranks of a run were started, as its log has them; none without a log,
    and for one that cannot be read."""
    try:
        return {node for event in read(log) if isinstance(event, Launch) for node in event.nodes}
    except ForgeError:
        return set()


def parse(line: str, log: Path) -> Event | None:
    """The event in a line of this log; None where there is none. Raises OtherFormat as `read`."""
    value = json_lines.parse(line)
    return _event(value, log) if value and isinstance(value.get("event"), str) else None


def last(log: Sequence[Event], *kinds: type[Event]) -> Event | None:
    """The newest event of these kinds, or None."""
    return next((event for event in reversed(log) if isinstance(event, kinds)), None)


def _event(line: dict[str, Any], log: Path) -> Event | None:
    if line.get("format") != FORMAT:
        what = f"event `{line['event']}` in {log}"
        raise OtherFormat.of(what, line.get("format"), FORMAT, fix=USE_THAT_VERSION)
    try:
        return _KINDS[line.pop("event")].model_validate(line)
    except (KeyError, ValidationError):
        return None  # edited by hand; the other events are still valid
