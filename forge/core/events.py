"""The event log of a run (events.jsonl): one class for each kind of event, written and read here only.

The log is append-only and spans all restarts of the run. An event is named as its class, in lower case.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from forge.core import json_lines
from forge.core.errors import USE_THAT_VERSION, ForgeError, OtherFormat
from forge.core.files import disk_trouble
from forge.core.terminal import duration

FORMAT = 1

# Causes for which the ranks are asked to stop; they save a checkpoint before they exit. In order of
# rising priority: when ranks have different causes, all take the cause with the highest.
STOP_CAUSES = ("", "deadline", "STOP file", "SIGUSR1", "SIGTERM", "Ctrl-C")
PERSONS_CAUSES = ("STOP file", "Ctrl-C")


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


class End(Event):
    """The end of a launch. Readers of the log ask for these attributes, so that a new end needs no change
    of theirs. Its cause or message, and its step, are fields of the class; a checkpoint of that step was
    saved where the cause is one of STOP_CAUSES.

    state: of the run after it. words: for people; mostly the state. starts_again: whether Forge or Slurm
    launches the run again, without a person. then: what the command does after it, for people.
    """

    state: ClassVar[Literal["completed", "stopped", "cut off", "failed"]]
    words: ClassVar[str]
    starts_again: ClassVar[bool] = False
    then: ClassVar[str] = "ending"

    @property
    def is_failure(self) -> bool:
        """Return whether ranks failed or were lost."""
        return self.state in ("cut off", "failed")

    @property
    def is_final(self) -> bool:
        """Return whether the run has ended by itself, so that only a person launches it again."""
        return self.state in ("completed", "failed")

    @property
    def text(self) -> str:
        """Cause or message as recorded; "" without one."""
        return getattr(self, "cause", "") or getattr(self, "message", "")

    @property
    def by_person(self) -> bool:
        return self.text in PERSONS_CAUSES

    @property
    def saved_step(self) -> int | None:
        """Step of the checkpoint that was saved for it; None where none was."""
        is_saved = not self.is_failure and self.text in STOP_CAUSES  # not after the loss of a rank
        return getattr(self, "step", None) if is_saved else None

    @property
    def fails_again(self) -> bool:
        """Return whether a rerun with the same config would end in the same way."""
        return getattr(self, "diverged", False)

    @property
    def who(self) -> str:
        """Process that tells of a failure."""
        return "launcher" if (rank := getattr(self, "rank", None)) is None else f"rank {rank}"

    @property
    def reason(self) -> str:
        """Cause for people; "" for none. That of an error has more lines: its own cause and fix."""
        return f"{self.who}: {self.text}" if hasattr(self, "rank") else self.text


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

    @property
    def log_prefix(self) -> str:
        """Prefix of the log names of this launch, as `LaunchSpec` has it."""
        return f"{self.job}.{self.restart}" if self.job else f"local.{self.launch}"


class Plugins(Event):
    """The launcher has imported these plugins of the project. used: name -> digest."""

    used: dict[str, str]


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
    for which training waited. Of another program they are the seconds of sealing, and 0. digest: of its
    manifest or seal, which proves of a pruned checkpoint what it was; "" in logs of before there was
    this key."""

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
    interval, stall: seconds; of a save. ettr: the goodput that is expected, in [0, 1]. basis: what is
    known of interruptions, for people."""

    step: int
    interval: float
    stall: float
    ettr: float
    basis: str

    @property
    def ettr_without_stalls(self) -> float:
        """For times of steps in which those of saves are contained already."""
        return self.ettr * (self.interval + self.stall) / self.interval

    def __str__(self) -> str:
        return (
            f"{self.ettr:.1%} with a checkpoint every {duration(self.interval, precise=True)} that"
            f" stalls training for {duration(self.stall, precise=True)}; {self.basis}"
        )


class Quarantine(Event):
    """A corrupt checkpoint was moved to quarantine/."""

    checkpoint: str
    reasons: list[str]


# --- the end of a launch ---------------------------------------------------------------------------


class Completed(End):
    """The run has reached train.max_steps."""

    state = words = "completed"
    then = "at its goal, finishing"

    step: int
    weights_digest: str


class Stop(End):
    """All ranks agreed to stop. cause: one of STOP_CAUSES. step: of the newest checkpoint."""

    state = words = "stopped"

    cause: str
    step: int


class RankError(Event):
    """Ranks of a launch ended with this message, in which numbers may differ. host: of the first."""

    ranks: list[int]
    host: str
    message: str


class Lost(End):
    """A rank exited without a record, or hung. silent: unresponsive nodes, which start no process any
    more."""

    state = words = "cut off"
    starts_again = True
    then = "a rank was lost, starting again"

    message: str
    attempt: int
    silent: list[str]

    @property
    def reason(self) -> str:
        return f"lost a rank: {self.message}"


class Failed(End):
    """Training failed with this exit code. diverged: a rerun with this config would fail again."""

    state = words = "failed"

    code: int
    rank: int
    message: str
    diverged: bool
    config_digest: str


class Preempted(Event):
    """Slurm preempted the job. What it did to the ranks is another event: mostly Requeue or Stop."""

    job: str
    step: int


class Requeue(End):
    """Forge requeues the job, after a stop or the loss of a rank."""

    state, words = "stopped", "requeued"
    starts_again = True

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
    for kind in (*Event.__subclasses__(), *Timed.__subclasses__(), *End.__subclasses__())
    if kind not in (Timed, End)
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
