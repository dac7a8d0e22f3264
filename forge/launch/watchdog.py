"""Watchdog of one rank of the trainer: records where the rank is when it makes no progress. No torch.

It ends no rank. Gloo raises at the timeout of a collective, and NCCL's watchdog ends the process without
a record; what this one wrote before then tells where each rank was, the one that hangs included.
"""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import threading
from collections.abc import Callable

from forge.core.errors import Exit, ForgeError
from forge.core.process import hostname
from forge.core.terminal import write
from forge.launch.heartbeat import Activity, Heartbeat, LastCollectives, heartbeat
from forge.launch.lost_ranks import PEER_LOST
from forge.launch.rank_records import LaunchSpec, RankRecord, withdraw
from forge.slurm import slurm

POLL_SEC = 1.0
POLLS = 5  # at least, within the limit of a stall
# A call into C that hangs may hold Python's GIL, so that no thread of Python runs: a thread of C then
# writes the stacks, at this many times the limit.
WITHOUT_PYTHON = 1.5


class Watchdog:
    """Looks at the heartbeat of one rank."""

    def __init__(
        self,
        spec: LaunchSpec,
        rank: int,
        dump: Callable[[], object],
        beats: Heartbeat = heartbeat,
        *,
        collectives: Callable[[], tuple[LastCollectives, ...]] = tuple,
    ) -> None:
        """Both are called once in each stall. dump: writes what a library knows of the collectives.
        collectives: their numbers, for the record."""
        self._spec, self._rank, self._dump, self._beats = spec, rank, dump, beats
        self._collectives = collectives
        self._stalled = False

    def start(self) -> None:
        """Look from now on until the process ends, in a thread.

        The time before is not part of a stall: the import of torch may take minutes.
        """
        self._beats.beat("start of training")
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def _run(self) -> None:
        never = threading.Event()
        while not never.wait(min(POLL_SEC, self._beats.limit_sec / POLLS)):
            # A full disk must not end the watchdog; the next look tries again.
            with contextlib.suppress(OSError, ForgeError):
                self.look()

    def look(self) -> None:
        """Write a provisional record while the rank is stalled, and its stacks once; withdraw the record
        when the rank makes progress again."""
        activity = self._beats.activity
        if activity.stalled:
            provisional(self._rank, activity).write_provisional(self._spec)
            if not self._stalled:
                self._stalled = True
                self._report(activity)
        else:
            faulthandler.dump_traceback_later(WITHOUT_PYTHON * self._beats.limit_sec)
            if self._stalled:
                self._stalled, self._beats.reaches_slurm = False, None
                self._beats.collectives = ()
                withdraw(self._spec, self._rank)
                _log(f"rank {self._rank} makes progress again: {activity.phase}")

    def _report(self, activity: Activity) -> None:
        faulthandler.cancel_dump_traceback_later()
        _log(f"rank {self._rank} has been {activity.where}; the stacks of its threads:")
        faulthandler.dump_traceback()
        self._beats.collectives = self._collectives()
        # Before the dump, which asks the device, and may hang with it.
        provisional(self._rank, self._beats.activity).write_provisional(self._spec)
        self._dump()
        of_node = self._rank % self._spec.ranks_per_node == 0  # one rank of each node asks
        if of_node and self._spec.job and self._spec.nodes > 1 and slurm.is_here():
            # A node that is cut off is told from one that only waits for it.
            limit = min(slurm.ASK_SEC, self._beats.limit_sec / 2)
            self._beats.reaches_slurm = not slurm.controller_trouble(timeout_sec=limit)


def provisional(rank: int, activity: Activity) -> RankRecord:
    """The record of a rank that may never write one itself: `failed` where it waits for others, `lost`
    where others wait for it."""
    return RankRecord(
        "failed" if activity.waits else "lost",
        rank,
        Exit.UNFIT,
        cause=PEER_LOST,
        message=f"no progress: {activity.where}",
        host=hostname(),
        activity=activity,
    )


def _log(line: str) -> None:
    """Report only in this rank's own log: a long phase need not be a hang."""
    write(line, sys.stderr)
