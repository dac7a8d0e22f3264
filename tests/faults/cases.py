"""Every fault at every point where it makes sense, and what must follow."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from injection import Fault

from forge.core.errors import Exit
from forge.core.failpoints import FAILPOINTS

EVERYTHING = os.environ.get("FORGE_FAULTS") == "all"  # `make faults`
KILLED = -9

# Every rank reaches these failpoints; only rank 0 reaches the others.
ON_EVERY_RANK = {
    *("data.read", "save.staged", "save.write", "save.sync", "save.written"),
    *("load.verify", "load.read", "load.done"),
}
LOADING = {point for point in FAILPOINTS if point.startswith("load.")}
PRUNING = {point for point in FAILPOINTS if point.startswith("prune.")}
# What follows the point is a write.
WRITING = {
    *("save.begin", "save.write", "save.sync"),
    *("commit.manifest", "commit.intent", "commit.rename", "commit.latest"),
}
READING = {"load.verify", "load.read"}
# There is a folder of a checkpoint whose files have been measured; a file that is cut before that is
# an error of its save.
MEASURED = {
    *("save.written", "commit.manifest", "commit.intent", "commit.rename", "commit.latest"),
    *("commit.done", "prune.rename", "prune.remove", *LOADING),
}
DAMAGES = ("truncate", "flip", "mix")
FAULTS = ("kill", "power", "term", "stop", "enospc", "eio", *DAMAGES)

SAVE_STEP = 8  # the second save: there is a checkpoint to fall back to
PRUNE_STEP = 4


@dataclass(frozen=True)
class Case:
    """One fault at one point, on so many ranks, and what `forge train` must then do."""

    point: str
    kind: str
    ranks: int

    @property
    def name(self) -> str:
        return f"{self.point}-{self.kind}-{self.ranks}"

    @property
    def rank(self) -> int:
        """The last rank, where it comes by at all."""
        return self.ranks - 1 if self.point in ON_EVERY_RANK else 0

    @property
    def code(self) -> int:
        """What the command that the fault strikes ends with."""
        if self.kind in ("kill", "stop"):
            return Exit.DONE  # the rank is lost, or was only asleep: the command itself goes on
        if self.kind == "term":
            return Exit.STOPPED
        if self.kind in ("enospc", "eio"):
            # What cannot be removed stays until the next save.
            return Exit.DONE if self.point in PRUNING else Exit.UNFIT
        if self.point == "data.read":
            return Exit.DATA if self.kind == "empty" else KILLED
        if self.point == "load.verify" and self.kind in DAMAGES:
            return Exit.DONE  # found at once
        return KILLED

    @property
    def is_quarantined(self) -> bool:
        """Whether the fault corrupts the checkpoint from which the run would resume."""
        return self.kind in DAMAGES and self.point not in PRUNING | {"data.read"}

    @property
    def spoils_data(self) -> bool:
        return self.point == "data.read" and self.kind in ("flip", "empty")

    def faults(self, shard: str) -> tuple[Fault, ...]:
        """What strikes. Damage is followed by a cut of the power, once it is committed."""
        target = shard if self.spoils_data else ""
        struck = Fault(self.kind, self.point, target=target, rank=self.rank, **self._when())
        if self.kind not in (*DAMAGES, "empty") or self.code != KILLED:
            return (struck,)
        if self.point.startswith(("save.", "commit.")):
            return struck, Fault("power", "commit.done", step=SAVE_STEP)
        return struck, Fault("power", self.point, rank=self.rank, **self._when())

    def _when(self) -> dict[str, Any]:
        if self.point == "data.read":
            return {"at": 11}
        if self.point == "save.staged":
            return {"at": 2}
        if self.point in LOADING:
            return {"at": 1}
        return {"step": PRUNE_STEP if self.point in PRUNING else SAVE_STEP}


def _makes_sense(point: str, kind: str) -> bool:
    if kind in ("kill", "power", "term", "stop"):
        return True
    if kind == "enospc":
        return point in WRITING
    if kind == "eio":
        return point in WRITING | READING | PRUNING
    if point == "data.read":
        return kind in ("flip", "empty")
    return kind in DAMAGES and (point in MEASURED or (point, kind) == ("save.sync", "flip"))


CASES = [
    Case(point, kind, ranks)
    for ranks in (1, 2)
    for point in FAILPOINTS
    for kind in (*FAULTS, "empty")
    if _makes_sense(point, kind)
]

# What every `make test-all` looks at, beside kill -9 at every point.
CHOSEN = {
    *("save.write-enospc-1", "save.sync-eio-1", "commit.latest-power-1", "commit.rename-enospc-1"),
    *("prune.rename-eio-1", "load.verify-flip-1", "load.read-eio-1", "commit.rename-mix-1"),
    *("commit.latest-truncate-1", "data.read-empty-1", "save.written-term-1"),
    *("save.sync-power-2", "save.written-kill-2", "commit.rename-kill-2", "load.read-kill-2"),
    *("commit.manifest-term-2", "save.write-eio-2", "save.sync-flip-1"),
}


def chosen() -> list[Case]:
    """The cases of this run of the tests."""
    return [
        case
        for case in CASES
        if EVERYTHING or case.name in CHOSEN or (case.kind, case.ranks) == ("kill", 1)
    ]
