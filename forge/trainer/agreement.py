"""The flags that ranks exchange with each step, and the decisions from them. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from forge.launch.stop_signal import CAUSES


class Flags(NamedTuple):
    """The flags that one rank sends to the others."""

    stop_cause: str  # one of CAUSES; "" to continue
    checkpoint_overdue: bool  # by its clock
    save_done: bool  # it has written its part of the save in progress

    @property
    def numbers(self) -> list[float]:
        """The flags as numbers, for a collective."""
        return [
            float(CAUSES.index(self.stop_cause)),
            float(self.checkpoint_overdue),
            float(self.save_done),
        ]


class Agreement(NamedTuple):
    """Decisions that all ranks share."""

    stop_cause: str = ""  # the one that comes last in CAUSES of all ranks' causes; "" to continue
    checkpoint_overdue: bool = False  # by the clock of rank 0
    save_done: bool = False  # all ranks have written their part of the save in progress

    @classmethod
    def of(cls, table: Sequence[Sequence[float]]) -> Agreement:
        """table: Flags.numbers of each rank, by rank."""
        return cls(
            stop_cause=CAUSES[int(max(row[0] for row in table))],
            checkpoint_overdue=bool(table[0][1]),
            save_done=all(row[2] for row in table),
        )
