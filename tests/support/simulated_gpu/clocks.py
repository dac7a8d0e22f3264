"""The order of what the host and the streams of a GPU do, by vector clocks (Fidge 1988, Mattern 1989).

Two accesses to one storage, of which at least one writes, are a race where neither happens before the
other. What the host launches on a stream happens after all that the host knows of.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

HOST = "the host"
Actor = str | int  # the host, or a stream
Clock = dict[Actor, int]  # the newest operation of each actor that is known to be over


@dataclass(frozen=True)
class Access:
    """An operation that has read or written a storage."""

    actor: Actor
    number: int  # of the actor's operations
    operation: str


class Order:
    """Who knows of which operation of whom."""

    def __init__(self) -> None:
        self._known: defaultdict[Actor, Counter[Actor]] = defaultdict(Counter)
        self.lock = threading.RLock()

    def begin(self, actor: Actor) -> None:
        """An operation, which the host does or launches on a stream."""
        with self.lock:
            if actor != HOST:
                self.wait(actor, self.clock(HOST))
            self._known[actor][actor] += 1

    def clock(self, actor: Actor) -> Clock:
        """What an event holds that is recorded now."""
        return dict(self._known[actor])

    def wait(self, actor: Actor, clock: Clock) -> None:
        """What the actor does next happens after all of this."""
        with self.lock:
            known = self._known[actor]
            for other, number in clock.items():
                known[other] = max(known[other], number)

    def wait_for_all(self) -> None:
        """The host waits for the device."""
        for stream in list(self._known):
            self.wait(HOST, self.clock(stream))

    def now(self, actor: Actor, operation: str) -> Access:
        return Access(actor, self._known[actor][actor], operation)

    def is_before(self, access: Access, actor: Actor) -> bool:
        """Whether an access is over when the actor does what it does now."""
        return access.actor == actor or self._known[actor][access.actor] >= access.number


class Accesses:
    """The last write to each storage, and what has read it since."""

    def __init__(self, order: Order, on_race: Callable[[str], None]) -> None:
        self._order, self._on_race = order, on_race
        self._write: dict[int, Access] = {}
        self._reads: defaultdict[int, dict[Actor, Access]] = defaultdict(dict)

    def read(self, actor: Actor, storage: int, operation: str) -> None:
        with self._order.lock:
            self._after_write(actor, storage, f"{operation} reads")
            self._reads[storage][actor] = self._order.now(actor, operation)

    def write(self, actor: Actor, storage: int, operation: str) -> None:
        with self._order.lock:
            self._after_write(actor, storage, f"{operation} writes")
            for read in self._reads[storage].values():
                if not self._order.is_before(read, actor):
                    self._race(actor, f"{operation} writes", read, "may still read")
            self._write[storage] = self._order.now(actor, operation)
            self._reads[storage] = {}

    def _after_write(self, actor: Actor, storage: int, what: str) -> None:
        write = self._write.get(storage)
        if write and not self._order.is_before(write, actor):
            self._race(actor, what, write, "may not have written yet")

    def _race(self, actor: Actor, what: str, other: Access, how: str) -> None:
        self._on_race(
            f"{what} on {name(actor)} what {other.operation} on {name(other.actor)} {how}"
        )


def name(actor: Actor) -> str:
    return actor if isinstance(actor, str) else f"stream {actor}"
